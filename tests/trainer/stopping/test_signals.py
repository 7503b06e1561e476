"""Stop signals, the time limit, and SIGTERM to a training process as a scheduler sends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.checkpoints import async_save
from paddlenlp_ext.trainer.checkpoints.output_dir import list_checkpoints
from paddlenlp_ext.trainer.objectives.sft_objective import CrossEntropy
from paddlenlp_ext.trainer.stopping import max_train_time
from paddlenlp_ext.trainer.stopping import signals as signals_module
from paddlenlp_ext.trainer.stopping.signals import StopSignals, TrainingStopped
from paddlenlp_ext.trainer.trainer import Trainer
from paddlenlp_ext.utils.stop_signals import STOP_SIGNALS, stop_program
from tests.common.scripts import script_environment
from tests.common.training import Rows, Tokenizer, make_config, make_model

SCRIPT = """
import sys
from paddlenlp_ext import configure_runtime
configure_runtime()
from paddlenlp_ext.trainer.checkpoints import async_save
from paddlenlp_ext.trainer.stopping import max_train_time
from paddlenlp_ext.trainer.trainer import Trainer
from tests.common.training import Rows, Tokenizer, make_config, make_model

config = make_config(sys.argv[1], max_steps=100000)
Trainer(make_model(lora=True), config, Rows(16), None, Tokenizer()).train()
"""


@pytest.fixture
def heard():
    """Return the signals that reach the handlers of this process."""
    heard = []
    before = {number: signal.signal(number, lambda number, frame: heard.append(number)) for number in STOP_SIGNALS}
    yield heard
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_stop_signals_first_sets_received_and_second_stops(number, heard, monkeypatch):
    monkeypatch.setattr(signals_module, "_REPEAT_SECONDS", 0.0)
    with StopSignals() as signals:
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received == number and heard == []
        os.kill(os.getpid(), number)
        assert heard == [number]


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_stop_signals_second_in_a_program_ends_the_process_instead_of_raising(number, heard, monkeypatch):
    """Test that no exception interrupts native code and no destructor runs, as after KeyboardInterrupt."""

    def end(number):
        raise ProcessEndedError(number)

    monkeypatch.setattr(signals_module, "exit_at_once", end)
    signal.signal(number, stop_program)  # as in run_command; `heard` restores the handler
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1 if number == signal.SIGINT else signal.SIGINT)
        with pytest.raises(ProcessEndedError, match=str(int(number))):
            os.kill(os.getpid(), number)
    assert signals.received != number and heard == []


class ProcessEndedError(Exception):
    """Replacement of the end of the process; the argument is the signal."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_stop_signals_repeated_at_once_counts_once(number, heard, monkeypatch):
    with StopSignals() as signals:
        for _ in range(3):  # as Paddle's launchers, and a closed terminal, do
            os.kill(os.getpid(), number)
        assert signals.received == number and heard == []
        monkeypatch.setattr(signals_module, "_REPEAT_SECONDS", 0.0)
        os.kill(os.getpid(), number)
        assert heard == [number]


def test_stop_signals_under_nohup_leave_sighup_ignored(heard):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.received is None and signal.getsignal(signal.SIGINT) != signal.SIG_IGN


class SendSignal(Callback):
    """Callback that sends this process a signal in the third step."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_step_end(self, state, report):
        if state.step == 3:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGUSR1, 138), (signal.SIGTERM, 143)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_trainer_on_each_signal_saves_the_finished_step_and_exits_with_its_code(tmp_path, number, code, heard):
    config = make_config(tmp_path, max_steps=9)
    trainer = Trainer(make_model(lora=True), config, Rows(16), None, Tokenizer(), callbacks=[SendSignal(number)])
    with pytest.raises(TrainingStopped, match=f"stopped by {number.name} after step 3 of 9; saved") as stopped:
        trainer.train()
    assert stopped.value.code == code and list(list_checkpoints(tmp_path)) == [3] and heard == []


class Clock(CrossEntropy):
    """Clock that moves by 10 s in a step, and by `save` s and `evaluation` s in these."""

    def __init__(self, monkeypatch, save: float, evaluation: float = 0.0) -> None:
        super().__init__(make_config(Path()))
        self.now, self.evaluation = 0.0, evaluation
        monkeypatch.setattr(max_train_time, "time", types.SimpleNamespace(monotonic=lambda: self.now))
        write = async_save.write_checkpoint
        monkeypatch.setattr(async_save, "write_checkpoint", lambda *given: (self.move(save), write(*given))[1])

    def move(self, seconds):
        self.now += seconds

    def measure(self, model, hidden_BSD, batch):
        self.move(10.0 if model.training else self.evaluation)
        return super().measure(model, hidden_BSD, batch)


def train_until(limit, tmp_path, clock, dev=None, **keys):
    config = make_config(tmp_path, max_steps=20, save_strategy="steps", max_train_time=limit, **keys)
    trainer = Trainer(make_model(lora=True), config, Rows(16), dev, Tokenizer(), objective=clock)
    trainer.started = 0.0
    with pytest.raises(TrainingStopped, match="stopped by max_train_time after step") as stopped:
        trainer.train()
    assert stopped.value.code == 75 and clock.now <= 65.0
    assert list(list_checkpoints(tmp_path))[-1] == trainer.state.step
    return trainer.state


@pytest.mark.parametrize(
    ("limit", "save", "save_steps", "step", "end"),
    [
        (65, 7.0, 3, 4, 54.0),  # three steps, a save, one step: 47 s; another step and save would end at 64 s
        ("0:01:05", 20.0, 2, 2, 40.0),  # two steps and a save that takes the time of the next ones
    ],
)
def test_trainer_stops_in_time_to_save_before_max_train_time(tmp_path, monkeypatch, limit, save, save_steps, step, end):
    clock = Clock(monkeypatch, save)
    assert train_until(limit, tmp_path, clock, save_steps=save_steps).step == step and clock.now == end


def test_trainer_leaves_an_evaluation_that_is_too_long_to_the_resumed_run(tmp_path, monkeypatch):
    clock = Clock(monkeypatch, 7.0, evaluation=25.0)
    evaluates = {"evaluation_strategy": "steps", "eval_steps": 1, "logging_steps": 20}
    state = train_until(65, tmp_path, clock, Rows(4), save_steps=2, **evaluates)
    assert (state.step, state.evaluation_due) == (2, True) and clock.now == 52.0


@pytest.mark.slow
def test_trainer_on_sigterm_logs_it_and_leaves_a_checkpoint(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")],
        env=script_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    seen = []
    for line in process.stderr:
        seen.append(line)
        if "step 3/" in line:
            process.send_signal(signal.SIGTERM)
            break
    seen += process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 128 + signal.SIGTERM
    assert "SIGTERM: finishing this optimizer step" in "".join(seen)
    assert "To continue: resume_from_checkpoint: true" in seen[-1] and "Traceback" not in "".join(seen)
    (folder,) = (tmp_path / "run").glob("checkpoint-*")
    state = json.loads((folder / "trainer_state.json").read_text())
    assert folder.name == f"checkpoint-{state['step']}" and state["step"] >= 3


class SignalAtItsEnd(StopSignals):
    """Signals of which one arrives just before the context `interruptible` stops being interruptible."""

    @property
    def _is_interruptible(self):
        return self.__dict__.get("is_interruptible", False)

    @_is_interruptible.setter
    def _is_interruptible(self, value):
        if self._is_interruptible and not value and not self._local_signal:
            self._on_signal(signal.SIGTERM, None)
        self.__dict__["is_interruptible"] = value


def test_signal_at_the_end_of_an_interruptible_block_is_caught():
    signals = SignalAtItsEnd()
    with signals.interruptible():
        pass
    assert signals.received == signal.SIGTERM and not signals._is_interruptible
