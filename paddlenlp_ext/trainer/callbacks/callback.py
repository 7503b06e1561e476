"""Base class of callbacks, and the list of a run's callbacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paddlenlp_ext.trainer.trainer_state import StepReport, TrainerState


class Callback:
    """Base class of callbacks. A subclass overrides the hooks that it needs. Hooks must not modify `state`.

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

    def on_skip(self, state: TrainerState) -> None:
        """Handle a step without an update: data are skipped, gradients overflow, or the loss is not finite."""

    def on_log(self, state: TrainerState, entry: dict[str, Any]) -> None:
        """Handle a new entry of `state.log_history`, from training or evaluation."""

    def on_evaluate(self, state: TrainerState, metrics: dict[str, float]) -> None:
        """Handle the metrics of an evaluation during training."""

    def on_phase(self, state: TrainerState, phase: str) -> None:
        """Handle the start of a phase: "evaluating", "saving", or "training" when training continues."""

    def on_rollback(self, state: TrainerState) -> None:
        """Handle a rollback to a checkpoint (`nan_policy: rollback`). `state` is the restored state."""

    def on_save(self, state: TrainerState, folder: Path) -> None:
        """Handle a completed checkpoint in `folder`. With `use_async_save`, `state` may belong to a later step."""

    def on_error(self, state: TrainerState, error: BaseException) -> None:
        """Handle an error or a stop that ends training; `on_train_end` is called next."""

    def on_train_end(self, state: TrainerState) -> None:
        """Handle the end of training, also after an error or a stop signal."""


class CallbackList:
    """Callbacks of a run, which the trainer calls in order."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.callbacks = list(callbacks)

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a hook of every callback; `hook` is a method name such as "on_log"."""
        for callback in self.callbacks:
            getattr(callback, hook)(*arguments)

    @contextmanager
    def phase(self, phase: str, state: TrainerState) -> Iterator[None]:
        """Call `on_phase` with `phase` at the start of the block, and with "training" at the end of the block."""
        self.call("on_phase", state, phase)
        try:
            yield
        finally:
            self.call("on_phase", state, "training")
