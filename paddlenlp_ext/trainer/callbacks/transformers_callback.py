"""Callbacks with the hooks and arguments of transformers' `TrainerCallback`.

| hook | keyword arguments in addition to `model` and `processing_class` (the tokenizer) |
|---|---|
| `on_train_begin`, `on_step_end`, `on_epoch_end`, `on_save`, `on_train_end` | |
| `on_log` | `logs` |
| `on_evaluate` | `metrics` |

The trainer does not call other hooks of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.trainer_state import StepReport, TrainerState


@dataclass
class TrainerControl:
    """Requests from callbacks to the trainer.

    After each step, the trainer handles logging, evaluation and saving, in this order.
    If a callback makes a request while the trainer logs or evaluates, an action that comes later in this order is still
    done in this step. Any other action is done after the next step.

    Attributes:
        should_training_stop: end training after this step, as if the step were the last step of the run.
        should_evaluate: evaluate after this step.
        should_save: save a checkpoint after this step.
        should_log: write a log entry after this step.
    """

    should_training_stop: bool = False
    should_evaluate: bool = False
    should_save: bool = False
    should_log: bool = False

    def take(self, request: str) -> bool:
        """Return the field `request`, and reset the field unless it is should_training_stop."""
        is_set = getattr(self, request)
        if request != "should_training_stop":
            setattr(self, request, False)
        return is_set


class TrainerCallback:
    """Base class of callbacks with transformers' signatures, for `add_callback` of the trainers.

    The attributes of `args` are the configuration keys of the run. `state` is the trainer's `TrainerState`.

    Examples:
        >>> from paddlenlp_ext import TrainerCallback
        >>> class StopAtLoss(TrainerCallback):
        ...     def on_log(self, args, state, control, logs=None, **kwargs):
        ...         if logs.get("loss", 1.0) < 0.1:
        ...             control.should_training_stop = True
    """

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Handle the start of training."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Handle the end of an optimizer step."""

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Handle the end of an epoch; called after `on_step_end` of the epoch's last step."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Handle a new entry of `state.log_history`."""

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Handle the metrics of an evaluation during training."""

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Handle the completion of a checkpoint."""

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Handle the end of training."""


class TransformersCallbackAdapter(Callback):
    """Callback that forwards the trainer's events to the hooks of a `TrainerCallback`.

    Args:
        callback: a `TrainerCallback`, or an object with some of the hooks of `TrainerCallback`.
        config: the run's configuration, the source of `args`.
        control: requests to the trainer, which the hooks may modify.
        model: passed to the hooks as `model`.
        tokenizer: passed to the hooks as `processing_class`.
    """

    def __init__(self, callback: Any, config: RunConfig, control: TrainerControl, model: Any, tokenizer: Any) -> None:
        self.callback, self._control = callback, control
        self._args = SimpleNamespace(**config.to_flat_dict())
        self._shared = {"model": model, "processing_class": tokenizer}

    def _call(self, hook: str, state: TrainerState, **arguments: Any) -> None:
        function = getattr(self.callback, hook, None)
        if function is not None:
            function(self._args, state, self._control, **self._shared, **arguments)

    def on_train_begin(self, state: TrainerState) -> None:
        self._call("on_train_begin", state)

    def on_step_end(self, state: TrainerState, report: StepReport) -> None:
        self._call("on_step_end", state)
        if state.batch_index == 0:
            self._call("on_epoch_end", state)

    def on_log(self, state: TrainerState, entry: dict[str, Any]) -> None:
        self._call("on_log", state, logs=entry)

    def on_evaluate(self, state: TrainerState, metrics: dict[str, float]) -> None:
        self._call("on_evaluate", state, metrics=metrics)

    def on_save(self, state: TrainerState, folder: Path) -> None:
        self._call("on_save", state)

    def on_train_end(self, state: TrainerState) -> None:
        self._call("on_train_end", state)
