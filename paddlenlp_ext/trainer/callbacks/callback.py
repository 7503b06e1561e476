"""Base class of callbacks, and the list through which the trainer calls them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paddlenlp_ext.trainer.trainer_state import StepReport, TrainerState


class Callback:
    """Base class of callbacks; a subclass overrides the hooks that it needs. A hook must not modify `state`.

    Examples:
        >>> from paddlenlp_ext import Callback
        >>> class PrintLoss(Callback):
        ...     def on_step_end(self, state, report):
        ...         print(f"step {state.step}: loss {report.loss:.3f}")
    """

    def on_train_begin(self, state: TrainerState) -> None:
        """Handle the start of training, after a checkpoint is restored and before the first step."""

    def on_step_end(self, state: TrainerState, report: StepReport) -> None:
        """Handle the end of an optimizer step."""

    def on_log(self, state: TrainerState, entry: dict[str, Any]) -> None:
        """Handle a new entry of `state.log_history`, from training or evaluation."""

    def on_evaluate(self, state: TrainerState, metrics: dict[str, float]) -> None:
        """Handle the metrics of an evaluation during training."""

    def on_rollback(self, state: TrainerState) -> None:
        """Handle the return to an earlier checkpoint, which `state` describes (`nan_policy: rollback`)."""

    def on_save(self, state: TrainerState, folder: Path) -> None:
        """Handle a complete checkpoint in `folder`; with `use_async_save`, `state` may describe a later step."""

    def on_train_end(self, state: TrainerState) -> None:
        """Handle the end of training, also after an error or a signal."""


class CallbackList:
    """Callbacks of a run, called in order."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.callbacks = list(callbacks)

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a hook, such as "on_log", of every callback."""
        for callback in self.callbacks:
            getattr(callback, hook)(*arguments)
