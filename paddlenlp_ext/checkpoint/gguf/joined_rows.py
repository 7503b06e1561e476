"""Convert layers that checkpoints store fused, and GGUF files separately: the rows of the fused weight, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from paddlenlp_ext.checkpoint.file_layouts.base import split_layer
from paddlenlp_ext.checkpoint.gguf.joined_tensors import JoinedTensors
from paddlenlp_ext.checkpoint.safetensors import LazyTensor
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard

FusedRows = Mapping[str, Sequence[str]]
"""Fused layer -> its layers, which have the same size; names start after "model.layers.N."."""


def split_rows(tensors: Mapping[str, LazyTensor], fused: FusedRows) -> dict[str, LazyTensor]:
    """Split the tensors of fused layers; the inverse of `JoinedRows`.

    Args:
        tensors: Hugging Face name -> tensor.
        fused: the fused layers.
    """
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        prefix, local_name = split_layer(name)
        layer, _, kind = local_name.rpartition(".")
        if layer not in fused:
            result[name] = tensor
            continue
        parts = fused[layer]
        rows = tensor.shape[0] // len(parts)
        for index, part in enumerate(parts):
            read = partial(_read_rows, tensor, slice(index * rows, (index + 1) * rows))
            result[f"{prefix}{part}.{kind}"] = LazyTensor((rows, *tensor.shape[1:]), tensor.dtype, read)
    return result


def _read_rows(tensor: LazyTensor, rows: slice) -> np.ndarray:
    return np.ascontiguousarray(tensor.read()[rows])


class JoinedRows(JoinedTensors):
    """Tensors of a GGUF file, with the layers of a fused layer joined as in the Hugging Face checkpoint.

    Raises:
        ValueError: a layer of a fused layer is missing.
    """

    def __init__(self, source: WeightSource, fused: FusedRows) -> None:
        joined = {part: layer for layer, parts in fused.items() for part in parts}
        parts: dict[str, list[str]] = {}
        for name in source.names():
            prefix, local_name = split_layer(name)
            layer, _, kind = local_name.rpartition(".")
            if layer in joined:
                parts[f"{prefix}{joined[layer]}.{kind}"] = [f"{prefix}{part}.{kind}" for part in fused[joined[layer]]]
            else:
                parts[name] = [name]
        super().__init__(source, parts)

    def shape(self, name: str) -> tuple[int, ...]:
        shapes = [self._source.shape(part) for part in self._parts[name]]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        parts = self._parts[name]
        if len(parts) == 1:
            return self._source.read(parts[0], dtype, shard)
        values = np.concatenate([self._source.read(part, dtype or self.dtype(name)) for part in parts])
        return values if shard is None else values[shard.index]
