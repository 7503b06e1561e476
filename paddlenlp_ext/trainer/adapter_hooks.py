"""What some adapter methods do besides being layers; a plain model does nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import paddle

from paddlenlp_ext.peft.peft_model import PeftModel


class TrainingHooks(Protocol):
    """The calls that `PeftModel` answers during training."""

    def plan_steps(self, total_steps: int) -> None:
        """Before any step; refuses a run that the method's schedule does not fit."""

    def before_training(self, run_batch: Callable[[], None]) -> None:
        """Before the first step of a fresh run; `run_batch()` runs the next batch forwards and backwards."""

    def auxiliary_loss(self) -> paddle.Tensor | None:
        """A scalar to add to each optimizer step's loss, or None."""

    def after_step(self, step: int, total_steps: int, learning_rate: float) -> None:
        """After optimizer step number `step`, counted from 1, while its gradients stand."""

    def training_state(self) -> dict[str, paddle.Tensor]:
        """What a resumed run needs beside the weights and the optimizer."""

    def restore_training_state(self, tensors: Mapping[str, np.ndarray]) -> None:
        """The reverse; the weights are back already."""


class NoHooks:
    """A plain model's."""

    def plan_steps(self, total_steps: int) -> None:
        """Nothing to plan."""

    def before_training(self, run_batch: Callable[[], None]) -> None:
        """Nothing to prepare."""

    def auxiliary_loss(self) -> paddle.Tensor | None:
        """Nothing to add."""

    def after_step(self, step: int, total_steps: int, learning_rate: float) -> None:
        """Nothing to do."""

    def training_state(self) -> dict[str, paddle.Tensor]:
        """Nothing to keep."""
        return {}

    def restore_training_state(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Nothing to take back."""


def reads_prompts(model: Any) -> bool:
    """Whether the model's adapter has to know where the batch's prompts end."""
    return isinstance(model, PeftModel) and model.peft_config.reads_prompts


def training_hooks(model: Any) -> TrainingHooks:
    """The model's own hooks where it is a PeftModel."""
    return model if isinstance(model, PeftModel) else NoHooks()
