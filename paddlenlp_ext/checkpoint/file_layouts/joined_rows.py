"""Convert between fused tensors and their parts in files; each part holds a range of rows of the fused tensor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.file_layouts.base import split_layer
from paddlenlp_ext.checkpoint.file_layouts.joined_tensors import JoinedTensors
from paddlenlp_ext.checkpoint.safetensors import LazyTensor, as_lazy
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard

FusedRows = Mapping[str, Mapping[str, int]]
"""Fused layer -> name of a part -> number of its rows relative to the other parts; the parts are in row order.

Names start after "model.layers.N.".
"""


def split_rows(tensors: Mapping[str, Any], fused: FusedRows, axis: int = 0) -> dict[str, Any]:
    """Split the tensors of fused layers; the inverse of `JoinedRows`.

    Args:
        tensors: name -> tensor.
        fused: the fused layers.
        axis: axis of the rows; 1 for stacked matrices.
    """
    result: dict[str, Any] = {}
    for name, tensor in tensors.items():
        prefix, local_name = split_layer(name)
        layer, _, kind = local_name.rpartition(".")
        if layer not in fused:
            result[name] = tensor
            continue
        whole, start = as_lazy(tensor), 0
        for part, share in fused[layer].items():
            rows = whole.shape[axis] * share // sum(fused[layer].values())
            read = partial(_read_rows, whole, slice(start, start + rows), axis)
            shape = (*whole.shape[:axis], rows, *whole.shape[axis + 1 :])
            result[f"{prefix}{part}.{kind}"] = LazyTensor(shape, whole.dtype, read)
            start += rows
    return result


def _read_rows(tensor: LazyTensor, rows: slice, axis: int) -> np.ndarray:
    return np.ascontiguousarray(tensor.read()[(slice(None),) * axis + (rows,)])


class JoinedRows(JoinedTensors):
    """Stored tensors, with the parts of each fused layer joined.

    The arguments are described at `split_rows`.

    Raises:
        ValueError: a part of a fused layer is missing.
    """

    def __init__(self, source: WeightSource, fused: FusedRows, axis: int = 0) -> None:
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
        self._axis = axis

    def shape(self, name: str) -> tuple[int, ...]:
        shapes = [self._source.shape(part) for part in self._parts[name]]
        if len(shapes) == 1:
            return shapes[0]
        before, after = shapes[0][: self._axis], shapes[0][self._axis + 1 :]
        return (*before, sum(shape[self._axis] for shape in shapes), *after)

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        parts = self._parts[name]
        if len(parts) == 1:
            return self._source.read(parts[0], dtype, shard)
        values = np.concatenate([self._source.read(part, dtype or self.dtype(name)) for part in parts], self._axis)
        return values if shard is None else values[shard.index]
