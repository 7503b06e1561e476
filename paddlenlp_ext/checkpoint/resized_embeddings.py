"""Resize the embedding and lm_head to a different vocabulary size while reading them.

    stored rows     E[0] ... E[V-1]
    enlarged        E[0] ... E[V-1] m ... m        m: mean of the stored rows, rounded to the stored dtype
    reduced         E[0] ... E[V'-1]

transformers draws new rows from a normal distribution around the mean m (`mean_resizing`). This module sets new rows to
m. New rows are equal in every process and in every run, so an adapter does not need to store the resized embedding and
lm_head.

Shapes: V stored rows, D hidden.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from paddlenlp_ext.checkpoint.dtypes import cast
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard

TABLES = frozenset({"model.embed_tokens.weight", "lm_head.weight"})
_CHUNK = 4096


def with_vocab_size(source: WeightSource, vocab_size: int | None) -> WeightSource:
    """Return `source` with embedding and lm_head resized to `vocab_size` rows; None: keep the stored size."""
    stored = {source.shape(name)[0] for name in source.names() if name in TABLES}
    return source if vocab_size is None or stored <= {vocab_size} else ResizedVocabulary(source, vocab_size)


class ResizedVocabulary(WeightSource):
    """Stored tensors, with embedding and lm_head resized to a different vocabulary size.

    Args:
        source: the stored tensors.
        vocab_size: number of rows of the resized tensors.
    """

    def __init__(self, source: WeightSource, vocab_size: int) -> None:
        self.path, self._source, self._vocab_size = source.path, source, vocab_size
        self._mean_of = cache(self._mean)

    def names(self) -> list[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._source.shape(name)
        return (self._vocab_size, *shape[1:]) if name in TABLES else shape

    def dtype(self, name: str) -> str:
        return self._source.dtype(name)

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        if name not in TABLES:
            return self._source.read(name, dtype, shard)
        dtype, size = dtype or self.dtype(name), self._source.shape(name)[0]
        start, stop = (0, self._vocab_size) if shard is None else (shard.start, shard.stop)
        assert shard is None or shard.axis == 0, "tables must be sharded by rows"
        stored = self._source.read(name, dtype, Shard(0, min(start, size), min(stop, size), size))
        num_new = max(0, stop - max(start, size))
        return np.concatenate([stored, np.broadcast_to(self._mean_of(name, dtype), (num_new, stored.shape[1]))])

    def _mean(self, name: str, dtype: str) -> np.ndarray:
        """Return the mean of the stored rows, [1, D], computed in double precision."""
        table_VD, stored = self._source.read(name), self.dtype(name)
        total_D = np.zeros(table_VD.shape[1])
        for start in range(0, len(table_VD), _CHUNK):  # chunks avoid a float32 copy of the full table
            total_D += cast(table_VD[start : start + _CHUNK], stored, "float32").sum(axis=0, dtype=np.float64)
        mean = (total_D / len(table_VD)).astype(np.float32)[None]
        return cast(cast(mean, "float32", stored), stored, dtype)
