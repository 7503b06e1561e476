"""Objective of a run: the loss of a micro-batch, its normalisation, and the metrics beside it.

The loss of a step is a sum over units of the global batch divided by their number, so that it does not depend on how
the global batch is divided into micro-batches. The units are target tokens in fine-tuning, and pairs in preference
training.

Shapes: B batch, S sequence, T tokens (B * S), D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.data.collate import Collate, PackedBatch, build_collate
from paddlenlp_ext.data.pose import position_skips
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


class CrossEntropy(Objective):
    """Mean cross entropy of the target tokens; the sum beside it is the number of correct predictions.

    Args:
        config: the run's configuration, for collation.
        context: the model's context, for PoSE.

    Raises:
        ValueError: see `position_skips`.
    """

    unit = "target token"
    num_sums = 1

    def __init__(self, config: RunConfig | None = None, context: int | None = None) -> None:
        self._config = config
        self._skips = None if config is None or context is None else position_skips(config, context)

    def build_collate(self, rows: Any, pad_token_id: int, vocab_size: int) -> Collate:
        """Return the function that collates micro-batches of `rows`."""
        assert self._config is not None, "collation needs the data section of a configuration"
        return build_collate(rows, self._config.data, pad_token_id, vocab_size, self._skips)

    def num_units(self, batch: PackedBatch) -> int:
        """Return the number of target tokens."""
        return batch.num_target_tokens

    def measure(
        self, model: TrainableModel, hidden_BSD: paddle.Tensor, batch: PackedBatch
    ) -> tuple[paddle.Tensor, np.ndarray]:
        """Return the cross entropy summed over the target tokens, and the number of correct predictions."""
        labels_T = paddle.to_tensor(batch.labels).reshape([-1])
        loss, num_correct = model.cross_entropy(hidden_BSD.reshape([-1, hidden_BSD.shape[-1]]), labels_T)
        return loss, np.array([num_correct], np.float64)

    def step_metrics(self, sums: np.ndarray) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def eval_metrics(self, loss: float, sums: np.ndarray, num_units: int) -> dict[str, float]:
        """Return accuracy and perplexity."""
        return {"accuracy": float(sums[0]) / num_units, "perplexity": math.exp(loss) if loss < 700 else math.inf}
