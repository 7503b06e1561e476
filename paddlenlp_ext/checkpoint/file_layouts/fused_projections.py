"""Fused projections: linear layers of the decoder that files store as one layer, stacked along the outputs.

    file       qkv_proj.weight [q + k + v, in]        gate_up_proj.weight [gate + up, in]
    decoder    q_proj, k_proj, v_proj                 gate_proj, up_proj

Adapters, quantization and sharding see only the separate projections. Weights are split while they are read and joined
while they are written, one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from paddlenlp_ext.checkpoint.safetensors import LazyTensor, as_lazy
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard

FusedLayers = Mapping[str, Mapping[str, int]]
"""Last component of a fused layer's name -> last component of each projection's name, in file order -> its outputs."""
_STACKED = ("weight", "bias")
_INTEGERS = ("weight_scale", "weight_zero", "weight_shape")
"""Tensors of an integer weight (quantization/integer_tensors.py) that are joined along with the weight."""


class FusedName(NamedTuple):
    """Name of a tensor of a fused layer, or of one of its projections."""

    fused: str
    """Dotted name of the fused layer."""
    part: str | None
    """Last component of the projection's name; None for a tensor of the fused layer itself."""
    leaf: str
    """Name within the layer, such as "weight" or "lora_A.weight"."""


def locate(name: str, layers: FusedLayers) -> FusedName | None:
    """Return the fused layer that the tensor `name` belongs to; None if it belongs to no fused layer."""
    fused_of = {part: fused for fused, parts in layers.items() for part in parts}
    components = name.split(".")
    for index, component in enumerate(components):
        if component in layers or component in fused_of:
            fused = ".".join([*components[:index], fused_of.get(component, component)])
            return FusedName(fused, component if component in fused_of else None, ".".join(components[index + 1 :]))
    return None


def part_name(fused: str, part: str) -> str:
    """Return the dotted name of the projection `part` of the fused layer `fused`."""
    return f"{fused.rpartition('.')[0]}.{part}".lstrip(".")


def part_rows(fused: str, layers: FusedLayers) -> dict[str, slice]:
    """Return the rows of each projection in the stacked tensors of the layer `fused`."""
    rows, start = {}, 0
    for part, size in layers[fused.rpartition(".")[2]].items():
        rows[part], start = slice(start, start + size), start + size
    return rows


class SplitWeights(WeightSource):
    """Weights of a file with fused layers, under the names of the separate projections.

    Quantized weights are left as they are; quantization/quantized_weight_source.py splits them.

    Args:
        source: the stored tensors.
        layers: the family's fused layers.

    Attributes:
        layers: the family's fused layers.

    Raises:
        ValueError: the size of a fused layer differs from the sum of its projections.
    """

    def __init__(self, source: WeightSource, layers: FusedLayers) -> None:
        self.path, self._source, self.layers = source.path, source, layers
        self._parts: dict[str, tuple[str, slice]] = {}
        self._names: list[str] = []
        located = {name: locate(name, layers) for name in source.names()}
        quantized = {found.fused for found in located.values() if found is not None and found.leaf not in _STACKED}
        for stored, found in located.items():
            is_packed = found is not None and found.leaf != "bias" and found.fused in quantized
            if found is None or found.part is not None or is_packed:
                self._names.append(stored)
                continue
            rows = part_rows(found.fused, layers)
            size = list(rows.values())[-1].stop
            if source.shape(stored)[0] != size:
                raise ValueError(
                    f"{self.path}: {stored} has {source.shape(stored)[0]} rows, but by config.json its projections "
                    f"({', '.join(rows)}) have {size}; download the model again"
                )
            parts = {f"{part_name(found.fused, part)}.{found.leaf}": (stored, own) for part, own in rows.items()}
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
    """Return the weights under the names of the decoder's layers; `source` itself for a family without fused layers.

    Raises:
        ValueError: see `SplitWeights`.
    """
    return SplitWeights(source, layers) if layers else source


def join_fused(tensors: Mapping[str, Any], layers: FusedLayers) -> dict[str, Any]:
    """Return the tensors to write, with the projections of fused layers joined when they are written.

    Args:
        tensors: Paddle tensors, NumPy arrays or LazyTensors by the names of the decoder's layers.
        layers: the family's fused layers.

    Raises:
        ValueError: a projection is quantized in a format that cannot be joined, or the projections have different
            formats.
    """
    written: dict[str, Any] = {}
    groups: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        found = locate(name, layers)
        if found is None:
            written[name] = tensor
            continue
        if found.leaf not in (*_STACKED, *_INTEGERS):
            raise ValueError(
                f"{name}: in files this layer is part of {found.fused}, and layers in this format cannot be joined; "
                "save the adapter, or merge it, instead of the quantized model"
            )
        assert found.part is not None, f"{name} is already fused"
        groups.setdefault(f"{found.fused}.{found.leaf}", {})[found.part] = as_lazy(tensor)
    return {**written, **{name: _stacked(name, parts, layers) for name, parts in groups.items()}}


def _stacked(name: str, parts: Mapping[str, LazyTensor], layers: FusedLayers) -> LazyTensor:
    """Return the tensor `name` of a fused layer, which is joined from its projections when it is read."""
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
            f"{name}: its projections ({', '.join(expected)}) are quantized in several formats; use one format"
        )
    if name.endswith(".weight_shape"):
        return LazyTensor((2,), first.dtype, lambda: _joined_shape([tensor.read() for tensor in tensors]))
    shape = (sum(tensor.shape[0] for tensor in tensors), *first.shape[1:])
    return LazyTensor(shape, first.dtype, lambda: np.concatenate([tensor.read() for tensor in tensors]))


def _joined_shape(shapes: list[np.ndarray]) -> np.ndarray:
    return np.array([sum(int(shape[0]) for shape in shapes), int(shapes[0][1])], np.int64)
