"""Objective of supervised fine-tuning: the cross entropy of the target tokens.

Shapes: B batch, S sequence, T tokens (B * S), D hidden.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.data.collate import Collate, PackedBatch, build_collate
from paddlenlp_ext.data.pose import position_skips
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.trainer.objectives.objective import Objective


class CrossEntropy(Objective):
    """Objective of supervised fine-tuning: mean cross entropy. The metric sum is the number of correct predictions.

    Args:
        config: the run's configuration; required by `build_collate`.
        context: maximum number of positions of the model, for PoSE.

    Raises:
        ValueError: the configuration of PoSE does not fit the model (`position_skips`).
    """

    unit = "target token"
    num_sums = 1

    def __init__(self, config: RunConfig | None = None, context: int | None = None) -> None:
        self._config = config
        self._skips = None if config is None or context is None else position_skips(config, context)

    def build_collate(self, rows: Any, pad_token_id: int, vocab_size: int) -> Collate:
        """Return the function that collates micro-batches of `rows`."""
        assert self._config is not None, "collation requires the data section of a configuration"
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
        """Return an empty dict: a step has no metrics except the loss."""
        return {}

    def eval_metrics(self, loss: float, sums: np.ndarray, num_units: int) -> dict[str, float]:
        """Return accuracy and perplexity."""
        return {"accuracy": float(sums[0]) / num_units, "perplexity": math.exp(loss) if loss < 700 else math.inf}
