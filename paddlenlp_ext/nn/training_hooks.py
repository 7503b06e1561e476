"""Training-loop hooks of adapter methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import paddle


class TrainingHooks:
    """No-op training-loop hooks. An adapter method overrides the hooks that it needs."""

    def plan_steps(self, total_steps: int) -> None:
        """Plan the method's schedule; called before the first step of every new or resumed run, and in a dry run.

        Raises:
            ValueError: the method's schedule does not fit the number of steps.
        """

    def before_training(self, run_batch: Callable[[], None]) -> None:
        """Prepare the adapter before the first step of a new run.

        Args:
            run_batch: function that runs the forward and backward pass of the next batch.
        """

    def auxiliary_loss(self) -> paddle.Tensor | None:
        """Return a scalar to add to the loss of each optimizer step, or None."""
        return None

    def after_step(self, step: int, total_steps: int, learning_rate: float) -> None:
        """Update the adapter after an optimizer step, before its gradients are cleared.

        Args:
            step: number of the step, counted from 1.
            total_steps: number of steps of the run.
            learning_rate: learning rate of the step, before `learning_rate_scale`.
        """

    def training_state(self) -> dict[str, paddle.Tensor]:
        """Return the tensors to checkpoint in addition to weights and optimizer state."""
        return {}

    def restore_training_state(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Restore the tensors of `training_state`; called after the weights are loaded."""
