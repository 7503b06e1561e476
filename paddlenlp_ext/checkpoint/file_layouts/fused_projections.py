"""Fused projections: files store several linear layers of the decoder as one layer, concatenated along the outputs.

    file       qkv_proj.weight [q + k + v, in]        gate_up_proj.weight [gate + up, in]
    decoder    q_proj, k_proj, v_proj                 gate_proj, up_proj

The decoder, adapters, quantization and sharding use separate projections. Reading splits the stored tensors, and
writing joins the projections, one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from paddlenlp_ext.checkpoint.safetensors import LazyTensor, as_lazy
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard

FusedLayers = Mapping[str, Mapping[str, int]]
"""Names of fused layers -> names of their projections in file order -> number of outputs of the projection.

A name is the last component of a dotted layer name, such as `qkv_proj`.
"""
_STACKED = ("weight", "bias")
_DIMS_OF_EXPERTS = 3
"""Number of dimensions of the stacked weights of experts, which are not split."""
_INTEGERS = ("weight_scale", "weight_zero", "weight_shape")
"""Tensors of a quantized integer weight (quantization/integer_tensors.py), which are joined like the weight."""


class FusedName(NamedTuple):
    """Components of the name of a tensor in a fused layer or in one of its projections."""

    fused: str
    """Dotted name of the fused layer."""
    projection: str | None
    """Name of the projection, such as "q_proj"; None if the tensor belongs to the fused layer."""
    tensor: str
    """Name of the tensor within the layer, such as "weight" or "lora_A.weight"."""


def locate(name: str, layers: FusedLayers) -> FusedName | None:
    """Split the name of a tensor in a fused layer or in one of its projections; return None for other tensors."""
    fused_of = {projection: fused for fused, projections in layers.items() for projection in projections}
    components = name.split(".")
    for index, component in enumerate(components):
        if component in layers or component in fused_of:
            fused = ".".join([*components[:index], fused_of.get(component, component)])
            return FusedName(fused, component if component in fused_of else None, ".".join(components[index + 1 :]))
    return None


def projection_name(fused: str, projection: str) -> str:
    """Return the dotted name of a projection, given the dotted name of its fused layer."""
    return f"{fused.rpartition('.')[0]}.{projection}".lstrip(".")


def projection_rows(fused: str, layers: FusedLayers) -> dict[str, slice]:
    """Return a map from each projection to its rows in the tensors of the layer `fused`."""
    rows, start = {}, 0
    for projection, size in layers[fused.rpartition(".")[2]].items():
        rows[projection], start = slice(start, start + size), start + size
    return rows


class SplitWeights(WeightSource):
    """Weights of a file with fused layers, split into the separate projections.

    Quantized weights remain fused; quantization/quantized_weight_source.py splits them.

    Args:
        source: the stored tensors.
        layers: the family's fused layers.

    Raises:
        ValueError: the number of rows of a fused layer differs from the sum over its projections.
    """

    def __init__(self, source: WeightSource, layers: FusedLayers) -> None:
        self.path, self._source, self.layers = source.path, source, layers
        self._parts: dict[str, tuple[str, slice]] = {}
        self._names: list[str] = []
        located = {name: locate(name, layers) for name in source.names()}
        quantized = {found.fused for found in located.values() if found is not None and found.tensor not in _STACKED}
        for stored, found in located.items():
            is_packed = found is not None and found.tensor != "bias" and found.fused in quantized
            is_stack = len(source.shape(stored)) == _DIMS_OF_EXPERTS
            if found is None or found.projection is not None or is_packed or is_stack:
                self._names.append(stored)
                continue
            rows = projection_rows(found.fused, layers)
            size = list(rows.values())[-1].stop
            if source.shape(stored)[0] != size:
                raise ValueError(
                    f"{self.path}: {stored} has {source.shape(stored)[0]} rows, but its projections "
                    f"({', '.join(rows)}) have {size} rows according to config.json; download the model again"
                )
            parts = {
                f"{projection_name(found.fused, projection)}.{found.tensor}": (stored, of_projection)
                for projection, of_projection in rows.items()
            }
            self._parts |= parts
            self._names += parts

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._parts:
            return self._source.shape(name)
        stored, rows = self._parts[name]
        return (rows.stop - rows.start, *self._source.shape(stored)[1:])

    def dtype(self, name: str) -> str:
        return self._source.dtype(self._parts[name][0] if name in self._parts else name)

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        if name not in self._parts:
            return self._source.read(name, dtype, shard)
        stored, rows = self._parts[name]
        start, stop = rows.start, rows.stop
        if shard is not None and shard.axis == 0:
            start, stop = rows.start + shard.start, rows.start + shard.stop
        values = self._source.read(stored, dtype, Shard(0, start, stop, self._source.shape(stored)[0]))
        return values[shard.index] if shard is not None and shard.axis else values


def split_fused(source: WeightSource, layers: FusedLayers) -> WeightSource:
    """Return the weights with fused layers split; return `source` itself for a family without fused layers.

    Raises:
        ValueError: see `SplitWeights`.
    """
    return SplitWeights(source, layers) if layers else source


def join_fused(tensors: Mapping[str, Any], layers: FusedLayers) -> dict[str, Any]:
    """Return the tensors to write; the projections of a fused layer are joined when the fused tensor is written.

    Args:
        tensors: name in the decoder -> Paddle tensor, NumPy array or LazyTensor.
        layers: the family's fused layers.

    Raises:
        ValueError: a projection is quantized in a format that cannot be joined, or the projections of a layer have
            different formats, or only some of them are quantized.
    """
    written: dict[str, Any] = {}
    groups: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        found = locate(name, layers)
        if found is None:
            written[name] = tensor
            continue
        if found.tensor not in (*_STACKED, *_INTEGERS):
            raise ValueError(
                f"{name}: files store this layer fused in {found.fused}, but layers in this format cannot be fused; "
                "save or merge the adapter instead of saving the quantized model"
            )
        assert found.projection is not None, f"{name} is already fused"
        groups.setdefault(f"{found.fused}.{found.tensor}", {})[found.projection] = as_lazy(tensor)
    return {**written, **{name: _stacked(name, parts, layers) for name, parts in groups.items()}}


def _stacked(name: str, parts: Mapping[str, LazyTensor], layers: FusedLayers) -> LazyTensor:
    """Return the tensor `name` of a fused layer; reading the tensor joins the tensors of its projections."""
    expected = layers[name.split(".")[-2]]
    if parts.keys() != expected.keys():
        raise ValueError(
            f"{name}: only {', '.join(parts)} of {', '.join(expected)} are quantized; quantize all or none"
        )
    tensors = [parts[part] for part in expected]
    first = tensors[0]
    sizes = {tensor.shape[1:] for tensor in tensors}
    if len(sizes) > 1 or any(tensor.dtype != first.dtype for tensor in tensors):
        raise ValueError(
            f"{name}: the formats of its projections ({', '.join(expected)}) differ; use one format for all"
        )
    if name.endswith(".weight_shape"):
        return LazyTensor((2,), first.dtype, lambda: _joined_shape([tensor.read() for tensor in tensors]))
    shape = (sum(tensor.shape[0] for tensor in tensors), *first.shape[1:])
    return LazyTensor(shape, first.dtype, lambda: np.concatenate([tensor.read() for tensor in tensors]))


def _joined_shape(shapes: list[np.ndarray]) -> np.ndarray:
    return np.array([sum(int(shape[0]) for shape in shapes), int(shapes[0][1])], np.int64)
