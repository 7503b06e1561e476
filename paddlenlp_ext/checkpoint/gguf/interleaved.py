"""Experts of gpt-oss in a GGUF file, whose gates and upper projections are apart, as Hugging Face's files have them.

in a GGUF file                                      as read
ffn_gate_exps, ffn_up_exps [E, F, D]                mlp.experts.gate_up_proj [E, D, 2F], columns gate 0, up 0, ...
ffn_gate_exps.bias, ffn_up_exps.bias [E, F]         mlp.experts.gate_up_proj_bias [E, 2F], likewise
ffn_down_exps [E, D, F]                             mlp.experts.down_proj [E, F, D]
"""

from __future__ import annotations

import numpy as np

from paddlenlp_ext.checkpoint.file_layout import split_layer
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard

_PARTS = {
    "mlp.experts.gate_up_proj": ("mlp.experts.gate_proj", "mlp.experts.up_proj"),
    "mlp.experts.gate_up_proj_bias": ("mlp.experts.gate_proj_bias", "mlp.experts.up_proj_bias"),
    "mlp.experts.down_proj": ("mlp.experts.down_proj",),
}


class InterleavedGates(WeightSource):
    """Tensors of a GGUF file of gpt-oss, under the names and in the shapes of Hugging Face's files.

    Raises:
        ValueError: the gates or the upper projections of a layer are missing.
    """

    def __init__(self, source: WeightSource) -> None:
        self.path, self._source = source.path, source
        joined = {part: name for name, parts in _PARTS.items() for part in parts}
        stored = source.names()
        self._parts: dict[str, list[str]] = {}
        for name in stored:
            prefix, own = split_layer(name)
            parts = _PARTS.get(joined.get(own, ""), (own,))
            self._parts[prefix + joined.get(own, own)] = [prefix + part for part in parts]
        missing = {part for parts in self._parts.values() for part in parts}.difference(stored)
        if missing:
            raise ValueError(f"{self.path}: no tensor of {min(missing)}; use a file with the whole model")

    def names(self) -> list[str]:
        return list(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        parts = self._parts[name]
        shape = self._source.shape(parts[0])
        if split_layer(name)[1] not in _PARTS:
            return shape
        experts, rows, *columns = shape
        return (experts, *columns, rows * len(parts))

    def dtype(self, name: str) -> str:
        return self._source.dtype(self._parts[name][0])

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        dtype = dtype or self.dtype(name)
        parts = [self._source.read(part, dtype, shard) for part in self._parts[name]]
        if split_layer(name)[1] not in _PARTS:
            return parts[0]
        assert shard is None or shard.axis == 0, "stacked experts are sharded by experts"
        experts, rows, *columns = parts[0].shape
        values = np.stack(parts, axis=2).reshape(experts, rows * len(parts), *columns)
        return np.ascontiguousarray(np.swapaxes(values, 1, 2)) if columns else values
