"""Interface of objectives: the loss of a micro-batch, the normalization of the loss, and metrics.

The loss of a step is a mean over the units of the global batch, not a mean over micro-batches. The units are target
tokens in fine-tuning, and pairs or answers in preference training.

Shapes: B batch, S sequence, T tokens (B * S), D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.data.collate import Collate
from paddlenlp_ext.data.step_batch import StepBatch
from paddlenlp_ext.nn.trainable_model import TrainableModel


class Objective:
    """Base class of objectives. By default, the hooks of the training loop do nothing.

    Attributes:
        unit: name of the unit for messages, such as "pair"; the loss is a mean over units.
        num_sums: number of metric sums that `measure` returns.
    """

    unit: str
    num_sums: int

    # -- implemented by every objective -------------------------------------------------------------------------------
    def build_collate(self, rows: Any, pad_token_id: int, vocab_size: int) -> Collate:
        """Return the function that collates micro-batches of `rows`; called before the model is trained."""
        raise NotImplementedError

    def num_units(self, batch: Any) -> int:
        """Return the number of units of a batch."""
        raise NotImplementedError

    def measure(self, model: TrainableModel, hidden_BSD: paddle.Tensor, batch: Any) -> tuple[paddle.Tensor, np.ndarray]:
        """Return the loss summed over the units of a batch, and the metric sums of the batch, float64 [num_sums].

        Args:
            model: the model.
            hidden_BSD: hidden states of the batch, the input of lm_head.
            batch: the batch.
        """
        raise NotImplementedError

    def step_metrics(self, sums: np.ndarray) -> dict[str, float]:
        """Return the metrics of an optimizer step; `sums` are the metric sums over the global batch."""
        raise NotImplementedError

    def eval_metrics(self, loss: float, sums: np.ndarray, num_units: int) -> dict[str, float]:
        """Return an evaluation's metrics except the loss; `loss` is the mean loss, and `sums` are over all batches."""
        raise NotImplementedError

    # -- hooks of the training loop -----------------------------------------------------------------------------------
    def begin(self) -> None:
        """Prepare for the first step of a run; called before a checkpoint is restored."""

    def before_step(self, step_batch: StepBatch, collate_rows: Collate) -> None:
        """Prepare the rows of a global batch before they are collated; called on all ranks.

        Args:
            step_batch: the global batch.
            collate_rows: result of `build_collate`.
        """

    def prepare(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Return the batches, completed with values that `measure` reads, such as reference log-probabilities.

        All ranks must run the same number of forward passes to compute these values.
        """
        return batches

    def after_step(self, step: int) -> None:
        """Handle the end of optimizer step `step`; the first step is 1."""

    def training_state(self) -> dict[str, paddle.Tensor]:
        """Return the tensors that a resumed run needs."""
        return {}

    def restore_training_state(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Load the result of `training_state`."""
