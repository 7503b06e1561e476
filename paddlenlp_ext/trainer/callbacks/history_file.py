"""Write history.jsonl: a line for each optimizer step, and a line for each event of a run (report/run_folder.py)."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.data.rollouts.prompt_dataset import PromptDataset
from paddlenlp_ext.report.run_folder import HISTORY_FILE, first_answers, read_lines
from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.callbacks.metrics_files import peak_memory_bytes
from paddlenlp_ext.trainer.callbacks.run_facts import describe_run_start, peak_device_bytes
from paddlenlp_ext.trainer.callbacks.sampled_answers import are_due, newest_answers
from paddlenlp_ext.trainer.stopping.signals import TrainingStopped, describe_stop
from paddlenlp_ext.trainer.trainer_state import StepReport, TrainerState
from paddlenlp_ext.utils.files import write_json, write_text
from paddlenlp_ext.utils.storage_errors import explained_errors


class HistoryFile(Callback):
    """Callback that appends steps and events to history.jsonl in output_dir.

    The values of a step are already on the host when the callback is called, so writing a line does not synchronize
    with the device. A resumed run first removes the lines of steps after the checkpoint, so that each step has one
    line.

    Args:
        output_dir: folder of the run.
        config: configuration of the run.
        rows: training rows, whose statistics are written at the start.
    """

    def __init__(self, output_dir: Path, config: RunConfig, rows: Any) -> None:
        self.path = output_dir / HISTORY_FILE
        self._config, self._rows = config, rows
        self._saves_answers = config.generation.eval_with_do_generation and config.generation.save_generation_output
        self._error: BaseException | None = None

    def on_train_begin(self, state: TrainerState) -> None:
        self._keep_until(state)
        facts = describe_run_start(self._config, self._rows, state.total_steps, sys.orig_argv)
        self._append(state, {"event": "resume" if state.step else "start", **facts})

    def on_step_end(self, state: TrainerState, report: StepReport) -> None:
        line = {
            "epoch": state.epoch,
            "loss": report.loss,
            "learning_rate": report.learning_rate,
            "grad_norm": report.grad_norm,
            **report.metrics,
            **state.scaling_metrics(),
            "num_tokens": state.num_tokens,
            "num_target_tokens": state.num_target_tokens,
            "tokens_per_second": report.num_tokens / max(report.seconds, 1e-9),
            "seconds": report.seconds,
            "peak_memory_bytes": peak_memory_bytes(),
            **peak_device_bytes(),
        }
        self._append(state, line)
        if isinstance(self._rows, PromptDataset) and are_due(state.step, state.total_steps):
            answers = newest_answers(self.path.parent, self._rows)
            self._append(state, {"event": "sampled_answers", "answers": answers})

    def on_skip(self, state: TrainerState) -> None:
        if state.step in state.overflow_steps:
            reason = "overflow"
        else:
            reason = "non_finite" if state.last_unstable == state.step else "data"
        self._append(state, {"skipped": reason})

    def on_evaluate(self, state: TrainerState, metrics: dict[str, float]) -> None:
        answers = {"answers": first_answers(self.path.parent)} if self._saves_answers else {}
        self._append(state, {"event": "evaluation", "epoch": state.epoch, **metrics, **answers})

    def on_rollback(self, state: TrainerState) -> None:
        from_step = max((line["step"] for line in read_lines(self.path)), default=state.step)
        self._keep_until(state)
        self._append(state, {"event": "rollback", "from_step": from_step})

    def on_save(self, state: TrainerState, folder: Path) -> None:
        self._append(state, {"event": "save", "folder": folder.name})

    def on_error(self, state: TrainerState, error: BaseException) -> None:
        self._error = error

    def on_train_end(self, state: TrainerState) -> None:
        self._append(state, {"event": "end", **_outcome(self._error)})

    def _append(self, state: TrainerState, values: dict[str, Any]) -> None:
        with explained_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(_line({"step": state.step, "time": round(time.time(), 3), **values}))

    def _keep_until(self, state: TrainerState) -> None:
        """Remove the lines of later steps, and the current step's evaluation if that evaluation will be repeated."""
        kept = [line for line in read_lines(self.path) if line["step"] <= state.step] if state.step else []
        if state.evaluation_due:
            kept = [line for line in kept if (line.get("event"), line["step"]) != ("evaluation", state.step)]
        write_text(self.path, "".join(map(_line, kept)))


def write_early_failure(output_dir: Path, config: RunConfig, error: BaseException) -> None:
    """Write run_config.json and history.jsonl for the report of a run that failed before its first step.

    Args:
        output_dir: existing folder of the run.
        config: configuration of the run.
        error: the error that ended the run.

    Raises:
        StorageError: the disk is full or read-only, or a permission is missing.
    """
    begun = {"event": "start", **describe_run_start(config, None, 0, sys.orig_argv)}
    write_json(output_dir / "run_config.json", config.to_flat_dict())
    stamp = {"step": 0, "time": round(time.time(), 3)}
    lines = ({**stamp, **begun}, {**stamp, "event": "end", **_outcome(error)})
    write_text(output_dir / HISTORY_FILE, "".join(map(_line, lines)))


def _outcome(error: BaseException | None) -> dict[str, str]:
    if error is None:
        return {"outcome": "completed"}
    if isinstance(error, TrainingStopped):
        return {"outcome": "stopped", "reason": describe_stop(error.reason)}
    if isinstance(error, KeyboardInterrupt):
        return {"outcome": "stopped", "reason": "Ctrl-C"}
    return {"outcome": "failed", "reason": str(error) or type(error).__name__}


def _line(values: dict[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False) + "\n"
