"""Read the weights of a language model into a reward model, which is a sequence classifier with one label."""

from __future__ import annotations

import numpy as np

from paddlenlp_ext.checkpoint.dtypes import cast
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard

SCORE_WEIGHT = "score.weight"
TASK_KEYS = ("architectures", "id2label", "label2id")
"""Keys of config.json that differ between a classifier and its language model."""
_LM_HEAD = "lm_head.weight"


class ClassifierWeights(WeightSource):
    """Tensors of `source` without lm_head; if `source` has no score head, a new score head is added.

    Args:
        source: the stored tensors.
        new_score: weight of a new score head, float32 [1, D].
    """

    def __init__(self, source: WeightSource, new_score: np.ndarray) -> None:
        self.path = source.path
        self._source = source
        self._new = {} if SCORE_WEIGHT in source.names() else {SCORE_WEIGHT: new_score}

    def names(self) -> list[str]:
        return [*(name for name in self._source.names() if name != _LM_HEAD), *self._new]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._new[name].shape if name in self._new else self._source.shape(name)

    def dtype(self, name: str) -> str:
        """Return the stored dtype; float32 for a new score head."""
        return "float32" if name in self._new else self._source.dtype(name)

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        if name not in self._new:
            return self._source.read(name, dtype, shard)
        assert shard is None, "the score head must not be sharded"
        return cast(self._new[name].copy(), "float32", dtype or "float32")
