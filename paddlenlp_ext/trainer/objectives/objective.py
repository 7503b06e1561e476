"""Objective of a run: the loss of a micro-batch, its normalisation, and the metrics beside it.

The loss of a step is a sum over units of the global batch divided by their number, so that it does not depend on how
the global batch is divided into micro-batches. The units are target tokens in fine-tuning, and pairs in preference
training.

Shapes: B batch, S sequence, T tokens (B * S), D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.data.collate import Collate
from paddlenlp_ext.nn.trainable_model import TrainableModel


class Objective:
    """Base class of the objectives of runs; the hooks of the training loop do nothing here.

    Attributes:
        unit: name of what the loss is a mean over, for messages.
        num_sums: length of the vector of sums that `measure` returns.
    """

    unit: str
    num_sums: int

    # -- implemented by every objective -------------------------------------------------------------------------------
    def build_collate(self, rows: Any, pad_token_id: int, vocab_size: int) -> Collate:
        """Return the function that collates micro-batches of `rows`; called before the model changes."""
        raise NotImplementedError

    def num_units(self, batch: Any) -> int:
        """Return the number of units of a batch."""
        raise NotImplementedError

    def measure(self, model: TrainableModel, hidden_BSD: paddle.Tensor, batch: Any) -> tuple[paddle.Tensor, np.ndarray]:
        """Return the loss summed over the units of a batch, and sums for its metrics, float64 [num_sums].

        Args:
            model: the model.
            hidden_BSD: hidden states of the batch, the input of lm_head.
            batch: the batch.
        """
        raise NotImplementedError

    def step_metrics(self, sums: np.ndarray) -> dict[str, float]:
        """Return the metrics of an optimizer step, from the sums over its global batch."""
        raise NotImplementedError

    def eval_metrics(self, loss: float, sums: np.ndarray, num_units: int) -> dict[str, float]:
        """Return the metrics of an evaluation beside its mean loss, from the sums over all batches."""
        raise NotImplementedError

    # -- hooks of the training loop -----------------------------------------------------------------------------------
    def begin(self) -> None:
        """Prepare for the first step of a new or resumed run; the model is ready to train."""

    def prepare(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Return the batches with everything that `measure` needs; may run forward passes, the same on all ranks."""
        return batches

    def after_step(self, step: int) -> None:
        """Follow an optimizer step; `step` counts from 1."""

    def training_state(self) -> dict[str, paddle.Tensor]:
        """Return the tensors that a resumed run needs."""
        return {}

    def restore_training_state(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Load the result of `training_state`."""
