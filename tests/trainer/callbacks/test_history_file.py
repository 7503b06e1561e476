"""history.jsonl and report.html of runs: each step once, events, resume, failures."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.callbacks.history_file import HistoryFile
from paddlenlp_ext.trainer.callbacks.report_page import refresh_report
from paddlenlp_ext.trainer.callbacks.run_facts import changed_keys
from paddlenlp_ext.trainer.stopping.signals import TrainingStopped
from paddlenlp_ext.trainer.train_step import NonFiniteError
from paddlenlp_ext.trainer.trainer_state import TrainerState
from paddlenlp_ext.utils.storage_errors import StorageError
from tests.common.training import make_config
from tests.trainer.test_trainer import DEV, make_trainer


def read(folder):
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def steps_of(lines):
    return [line["step"] for line in lines if "event" not in line]


def events_of(lines):
    return [(line["event"], line["step"]) for line in lines if "event" in line]


class StopAt(Callback):
    """Callback that fails after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, state, report):
        if state.step == self.step:
            raise RuntimeError("no power")


def test_history_has_each_step_and_event_whatever_logging_steps_is(tmp_path):
    keys = {"max_steps": 4, "evaluation_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 4}
    trainer = make_trainer(tmp_path, dev=DEV, logging_steps=100, **keys)
    trainer.train()
    lines = read(tmp_path)
    assert steps_of(lines) == [1, 2, 3, 4]
    assert events_of(lines) == [("start", 0), ("evaluation", 2), ("evaluation", 4), ("save", 4), ("end", 4)]
    step = next(line for line in lines if "loss" in line)
    assert {"time", "loss", "learning_rate", "grad_norm", "num_tokens", "tokens_per_second", "peak_memory_bytes"} <= {
        *step
    }
    assert sum(line.get("loss", 0) for line in lines) == pytest.approx(trainer.state.train_loss_sum)
    assert "Completed: 4 steps" in (tmp_path / "report.html").read_text()


def test_history_of_a_resumed_run_has_each_step_once(tmp_path):
    keys = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
    with pytest.raises(RuntimeError):
        make_trainer(tmp_path, callbacks=[StopAt(3)], **keys).train()
    lines = read(tmp_path)
    assert steps_of(lines) == [1, 2, 3]
    assert (lines[-1]["outcome"], lines[-1]["reason"]) == ("failed", "no power")
    assert "Failed at step 3 of 5: no power" in (tmp_path / "report.html").read_text()
    make_trainer(tmp_path, resume_from_checkpoint=True, **keys).train()
    lines = read(tmp_path)
    assert steps_of(lines) == [1, 2, 3, 4, 5]
    assert events_of(lines) == [("start", 0), ("save", 2), ("resume", 2), ("save", 4), ("end", 5)]


def test_report_while_the_run_goes_on_says_so(tmp_path):
    class Read(Callback):
        def on_step_end(self, state, report):
            self.page = (tmp_path / "report.html").read_text()

    callback = Read()
    make_trainer(tmp_path, max_steps=1, callbacks=[callback]).train()
    assert "Running: step 0 of 1" in callback.page


def test_history_of_a_new_run_in_the_folder_of_a_killed_run_starts_empty(tmp_path):
    (tmp_path / "history.jsonl").write_text('{"step": 0, "event": "start"}\n{"step": 1, "loss": 9.0}\n')
    make_trainer(tmp_path, max_steps=1).train()
    assert events_of(read(tmp_path)) == [("start", 0), ("end", 1)]


def test_history_marks_skipped_steps(tmp_path):
    make_trainer(tmp_path, max_steps=3, skip_data_intervals=[[2, 2]]).train()
    assert [(line["step"], line.get("skipped")) for line in read(tmp_path) if "event" not in line] == [
        (1, None), (2, "data"), (3, None)
    ]  # fmt: skip


def test_history_on_a_full_disk_is_a_storage_error(tmp_path, monkeypatch):
    opened = Path.open

    def full(path, mode="r", **keys):
        if path.name == "history.jsonl" and mode == "a":
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, mode, **keys)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(StorageError, match=r"history.jsonl: no space is left on the device; free some space"):
        make_trainer(tmp_path, max_steps=1).train()


def test_refresh_report_of_a_damaged_file_warns_and_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "history.jsonl").write_text("{broken\n")
    refresh_report(tmp_path)
    assert "report.html was not written" in caplog.text and "history.jsonl:1: damaged" in caplog.text


def test_changed_keys_are_the_keys_that_differ_from_their_defaults(tmp_path):
    changed = changed_keys(make_config(tmp_path, learning_rate=0.25))
    assert changed["learning_rate"] == [0.25, 5e-5] and "lr_scheduler_type" not in changed


def test_history_after_a_rollback_lacks_the_steps_that_were_undone(tmp_path):
    lines = [{"step": step, "loss": 1.0} for step in (1, 2, 3)]
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    HistoryFile(tmp_path, make_config(tmp_path), rows=None).on_rollback(TrainerState(step=2))
    *steps, event = read(tmp_path)
    assert steps_of(steps) == [1, 2]
    assert (event["event"], event["step"], event["from_step"]) == ("rollback", 2, 3)


@pytest.mark.parametrize(("is_due", "kept"), [(True, []), (False, [("evaluation", 2)])])
def test_history_of_a_run_that_repeats_an_evaluation_has_it_once(tmp_path, is_due, kept):
    (tmp_path / "history.jsonl").write_text('{"step": 2, "loss": 1.0}\n{"step": 2, "event": "evaluation"}\n')
    state = TrainerState(step=2, total_steps=4, evaluation_due=is_due)
    HistoryFile(tmp_path, make_config(tmp_path), rows=None).on_train_begin(state)
    assert events_of(read(tmp_path)) == [*kept, ("resume", 2)]


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (TrainingStopped(15, "stopped by SIGTERM after step 2 of 4"), {"outcome": "stopped", "reason": "SIGTERM"}),
        (KeyboardInterrupt(), {"outcome": "stopped", "reason": "Ctrl-C"}),
        (NonFiniteError(1.0, 2.0, "step 3: nan"), {"outcome": "failed", "reason": "step 3: nan"}),
        (AssertionError(), {"outcome": "failed", "reason": "AssertionError"}),
    ],
)
def test_history_tells_how_a_run_ended(tmp_path, error, end):
    history = HistoryFile(tmp_path, make_config(tmp_path), rows=None)
    history.on_error(TrainerState(step=2), error)
    history.on_train_end(TrainerState(step=2))
    (line,) = read(tmp_path)
    assert {name: line[name] for name in end} == end
