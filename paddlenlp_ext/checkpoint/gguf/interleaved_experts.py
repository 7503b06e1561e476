"""Convert the experts of gpt-oss: GGUF files store gate_proj and up_proj separately; checkpoints interleave them.

in a GGUF file                                      as read
ffn_gate_exps, ffn_up_exps [E, F, D]                mlp.experts.gate_up_proj [E, D, 2F], columns gate 0, up 0, ...
ffn_gate_exps.bias, ffn_up_exps.bias [E, F]         mlp.experts.gate_up_proj_bias [E, 2F], in the same order
ffn_down_exps [E, D, F]                             mlp.experts.down_proj [E, F, D]
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.file_layouts.base import split_layer
from paddlenlp_ext.checkpoint.file_layouts.joined_tensors import JoinedTensors
from paddlenlp_ext.checkpoint.safetensors import LazyTensor
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard

STACKED_EXPERTS = {
    f"ffn_{name}_exps.{kind}": f"mlp.experts.{name}_proj{ending}"
    for name in ("gate", "up", "down")
    for kind, ending in (("weight", ""), ("bias", "_bias"))
}
"""Name in a GGUF block -> name in a decoder layer with separate gate_proj and up_proj."""
_PARTS = {
    "mlp.experts.gate_up_proj": ("mlp.experts.gate_proj", "mlp.experts.up_proj"),
    "mlp.experts.gate_up_proj_bias": ("mlp.experts.gate_proj_bias", "mlp.experts.up_proj_bias"),
    "mlp.experts.down_proj": ("mlp.experts.down_proj",),
}


def split_gates(tensors: Mapping[str, LazyTensor], config: Any) -> dict[str, LazyTensor]:
    """Split gate_up_proj into gate_proj and up_proj; the inverse of `InterleavedGates`.

    Args:
        tensors: Hugging Face name -> tensor.
        config: unused argument of `Architecture.split`.
    """
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        prefix, local_name = split_layer(name)
        parts = _PARTS.get(local_name)
        if parts is None:
            result[name] = tensor
            continue
        experts, *rows, columns = tensor.shape
        shape = (experts, columns // len(parts), *rows)
        for index, part in enumerate(parts):
            read = partial(_read_part, tensor, index, len(parts))
            result[prefix + part] = LazyTensor(shape, tensor.dtype, read)
    return result


def _read_part(joined: LazyTensor, index: int, count: int) -> np.ndarray:
    """Return every `count`-th column, starting at column `index`, transposed to rows."""
    values = joined.read()[..., index::count]
    return np.swapaxes(values, 1, 2) if values.ndim == 3 else values


class InterleavedGates(JoinedTensors):
    """Tensors of a GGUF file, with gate_proj and up_proj interleaved as in the Hugging Face checkpoint.

    Raises:
        ValueError: gate_proj or up_proj of a layer is missing.
    """

    def __init__(self, source: WeightSource) -> None:
        joined = {part: name for name, parts in _PARTS.items() for part in parts}
        parts: dict[str, list[str]] = {}
        for name in source.names():
            prefix, local_name = split_layer(name)
            parts[prefix + joined.get(local_name, local_name)] = [
                prefix + part for part in _PARTS.get(joined.get(local_name, ""), (local_name,))
            ]
        super().__init__(source, parts)

    def shape(self, name: str) -> tuple[int, ...]:
        parts = self._parts[name]
        shape = self._source.shape(parts[0])
        if split_layer(name)[1] not in _PARTS:
            return shape
        experts, rows, *columns = shape
        return (experts, *columns, rows * len(parts))

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        dtype = dtype or self.dtype(name)
        parts = [self._source.read(part, dtype, shard) for part in self._parts[name]]
        if split_layer(name)[1] not in _PARTS:
            return parts[0]
        assert shard is None or shard.axis == 0, "stacked experts must be sharded by experts"
        experts, rows, *columns = parts[0].shape
        values = np.stack(parts, axis=2).reshape(experts, rows * len(parts), *columns)
        return np.ascontiguousarray(np.swapaxes(values, 1, 2)) if columns else values
