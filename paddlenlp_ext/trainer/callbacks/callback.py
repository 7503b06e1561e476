"""Interface of callbacks, and the list that calls several of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paddlenlp_ext.trainer.trainer_state import StepReport, TrainerState


class Callback:
    """Base callback; every hook is a no-op. `state` belongs to the trainer and must not be modified."""

    def on_train_begin(self, state: TrainerState) -> None:
        """Handle the start of training, after a checkpoint is restored and before the first step."""

    def on_step_end(self, state: TrainerState, report: StepReport) -> None:
        """Handle the end of an optimizer step."""

    def on_log(self, state: TrainerState, entry: dict[str, Any]) -> None:
        """Handle a new entry of `state.log_history`, from training or evaluation."""

    def on_evaluate(self, state: TrainerState, metrics: dict[str, float]) -> None:
        """Handle the result of an evaluation during training."""

    def on_rollback(self, state: TrainerState) -> None:
        """Handle the return to an earlier checkpoint, whose state this is (`nan_policy: rollback`)."""

    def on_save(self, state: TrainerState, folder: Path) -> None:
        """Handle a complete checkpoint in `folder`; with `use_async_save`, `state` is that of a later step."""

    def on_train_end(self, state: TrainerState) -> None:
        """Handle the end of training, including its end by an error or a signal."""


class CallbackList(Callback):
    """Callback that forwards every hook to several callbacks in order."""

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

    def on_rollback(self, state: TrainerState) -> None:
        for callback in self.callbacks:
            callback.on_rollback(state)

    def on_save(self, state: TrainerState, folder: Path) -> None:
        for callback in self.callbacks:
            callback.on_save(state, folder)

    def on_train_end(self, state: TrainerState) -> None:
        for callback in self.callbacks:
            callback.on_train_end(state)
