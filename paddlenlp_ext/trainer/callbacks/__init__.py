"""What the trainer tells of a run while it goes on. Logs, progress, pictures and reports listen here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paddlenlp_ext.trainer.state import StepReport, TrainerState


class Callback:
    """Listener with nothing to say; override what is wanted. `state` is the trainer's own: read it, leave it alone."""

    def on_train_begin(self, state: TrainerState) -> None:
        """Before the first step, after a resumed state has been restored."""

    def on_step_end(self, state: TrainerState, report: StepReport) -> None:
        """After every optimizer step."""

    def on_log(self, state: TrainerState, entry: dict[str, Any]) -> None:
        """When an entry joins `state.log_history` (training and evaluation alike)."""

    def on_evaluate(self, state: TrainerState, metrics: dict[str, float]) -> None:
        """After an evaluation during training."""

    def on_save(self, state: TrainerState, folder: Path) -> None:
        """After a checkpoint has taken its name."""

    def on_train_end(self, state: TrainerState) -> None:
        """When training is over, however it ended."""


class CallbackList(Callback):
    """Several callbacks as one, told in order."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.callbacks = list(callbacks)

    def on_train_begin(self, state: TrainerState) -> None:
        for callback in self.callbacks:
            callback.on_train_begin(state)

    def on_step_end(self, state: TrainerState, report: StepReport) -> None:
        for callback in self.callbacks:
            callback.on_step_end(state, report)

    def on_log(self, state: TrainerState, entry: dict[str, Any]) -> None:
        for callback in self.callbacks:
            callback.on_log(state, entry)

    def on_evaluate(self, state: TrainerState, metrics: dict[str, float]) -> None:
        for callback in self.callbacks:
            callback.on_evaluate(state, metrics)

    def on_save(self, state: TrainerState, folder: Path) -> None:
        for callback in self.callbacks:
            callback.on_save(state, folder)

    def on_train_end(self, state: TrainerState) -> None:
        for callback in self.callbacks:
            callback.on_train_end(state)
