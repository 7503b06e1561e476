"""Convert GPTQ, AWQ and compressed-tensors weights to and from this package's integer format.

    in a GPTQ checkpoint                     as read (quantization/integer_tensors.py)
    q_proj.qweight int32 [in / 8, out]       q_proj.weight uint8 [out * in / 2], two codes per byte
    q_proj.scales float16 [groups, out]      q_proj.weight_scale [out, groups]
    q_proj.qzeros, q_proj.g_idx              q_proj.weight_zero, q_proj.weight_order

Codes are rearranged but not requantized, so the conversion is exact. Tensors are converted one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.dtypes import cast
from paddlenlp_ext.checkpoint.quantized_formats.packed_layout import INTEGER_PARTS, IntegerMatrix, PackedLayout
from paddlenlp_ext.checkpoint.safetensors import LazyTensor, as_lazy
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard

_WEIGHT = ".weight"
_SCALE, _SHAPE, _ZERO, _ORDER = INTEGER_PARTS


class PackedWeights(WeightSource):
    """Stored tensors with packed weights converted to this package's integer format.

    Args:
        source: the stored tensors.
        layout: format of the packed weights.

    Raises:
        ValueError: a tensor of a quantized layer is missing.
    """

    def __init__(self, source: WeightSource, layout: PackedLayout) -> None:
        self.path, self._source, self._layout = source.path, source, layout
        stored = source.names()
        layers = [name.removesuffix(layout.marker) for name in stored if name.endswith(layout.marker)]
        parts = {layer + part for layer in layers for part in (layout.marker, *layout.parts)}
        self._names = [name for name in stored if name not in parts]
        self._parts = {layer + part: (layer, part) for layer in layers for part in (_WEIGHT, *INTEGER_PARTS)}
        missing = set().union(*(layout.required(layer) for layer in layers)) - set(stored)
        if missing:
            raise ValueError(f"{self.path}: {min(missing)} is missing; download or save the model again")

    def names(self) -> list[str]:
        return [*self._names, *self._parts]

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._parts:
            return self._source.shape(name)
        layer, part = self._parts[name]
        outputs, inputs = self._layout.shape(self._source, layer)
        if part == _WEIGHT:
            return (outputs, inputs) if self._layout.bits == 8 else (-(-outputs * inputs // 2),)
        return {_SHAPE: (2,), _ORDER: (inputs,)}.get(part, (outputs, self._num_groups(layer)))

    def _num_groups(self, layer: str) -> int:
        """Return the number of groups in a layer, from the shape of the scales: [groups, out] or [out, groups]."""
        outputs, _ = self._layout.shape(self._source, layer)
        return int(np.prod(self._source.shape(self._layout.scale_name(layer)))) // outputs

    def dtype(self, name: str) -> str:
        if name not in self._parts:
            return self._source.dtype(name)
        layer, part = self._parts[name]
        if part == _SCALE:
            return self._source.dtype(self._layout.scale_name(layer))
        codes = "int8" if self._layout.bits == 8 else "uint8"
        return {_WEIGHT: codes, _SHAPE: "int64", _ZERO: "int16", _ORDER: "int32"}[part]

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        if name not in self._parts:
            return self._source.read(name, dtype, shard)
        assert shard is None, "quantized weights must be read in full and sharded afterwards"
        layer, part = self._parts[name]
        layout, source = self._layout, self._source
        try:
            if part == _WEIGHT:
                return self._codes(layer)
            if part == _SCALE:
                return np.ascontiguousarray(layout.scales(source, layer, dtype or self.dtype(name)))
            if part == _ZERO:
                return np.ascontiguousarray(layout.zeros(source, layer) - np.int16(layout.middle))
            if part == _ORDER:
                return self._order(layer)
            return np.array(layout.shape(source, layer), np.int64)
        except KeyError as error:
            raise ValueError(f"{self.path}: {error.args[0]} is missing; download or save the model again") from error

    def _codes(self, layer: str) -> np.ndarray:
        codes = self._layout.codes(self._source, layer)
        order = self._order(layer)
        if not bool((order == np.arange(len(order))).all()):
            codes = codes[:, order]
        if self._layout.bits == 8:
            return (codes.astype(np.int16) - 128).astype(np.int8)
        flat = np.ascontiguousarray(codes).reshape(-1)
        flat = np.append(flat, np.uint8(self._layout.middle)) if len(flat) % 2 else flat
        return (flat[::2] << 4) | flat[1::2]

    def _order(self, layer: str) -> np.ndarray:
        """Return the indices of the inputs of a layer, sorted by group, int32 [in].

        Raises:
            ValueError: the groups do not have equal sizes.
        """
        _, inputs = self._layout.shape(self._source, layer)
        groups, count = self._layout.groups(self._source, layer), self._num_groups(layer)
        if groups is None:
            groups = np.arange(inputs) * count // max(inputs, 1)
        is_known = groups.shape == (inputs,) and inputs > 0 and groups.min() >= 0 and groups.max() < count
        if not is_known or set(np.bincount(groups, minlength=count)) != {inputs / count}:
            raise ValueError(
                f"{self.path}: {layer} does not divide its {inputs} inputs into {count} groups of equal size; "
                "start from the original model"
            )
        return np.argsort(groups, kind="stable").astype(np.int32)


def pack_tensors(tensors: Mapping[str, Any], layout: PackedLayout, scale_dtype: str) -> dict[str, Any]:
    """Return the tensors of a model with the integer weights converted to a packed format.

    Args:
        tensors: name in files -> tensor; integer weights have the format of quantization/integer_tensors.py.
        layout: packed format.
        scale_dtype: dtype of written scales, which must represent the scales exactly.

    Raises:
        ValueError: the format does not support the shape of a weight.
    """
    layers = [name.removesuffix(_SCALE) for name in tensors if name.endswith(_SCALE)]
    parts = {layer + part for layer in layers for part in (_WEIGHT, *INTEGER_PARTS)}
    written = {name: tensor for name, tensor in tensors.items() if name not in parts}
    for layer in layers:
        assert layer + _ORDER not in tensors, f"{layer}: integer weights must not reorder inputs"
        matrix = _integer_matrix(tensors, layer, layout)
        for name, values in layout.tensors(layer, matrix).items():
            is_scale = name == layout.scale_name(layer)
            written[name] = _in_dtype(values, scale_dtype) if is_scale else values
    return written


def _in_dtype(values: np.ndarray, dtype: str) -> LazyTensor:
    return LazyTensor(values.shape, dtype, lambda: cast(values, "float32", dtype))


def _integer_matrix(tensors: Mapping[str, Any], layer: str, layout: PackedLayout) -> IntegerMatrix:
    """Return the codes, scales and zero points of a layer."""
    scales = as_lazy(tensors[layer + _SCALE]).read()
    codes = as_lazy(tensors[layer + _WEIGHT]).read()
    zeros = np.full(scales.shape, layout.middle, np.int16)
    if layer + _ZERO in tensors:
        zeros = zeros + as_lazy(tensors[layer + _ZERO]).read()
    if layout.bits == 8:
        return IntegerMatrix((codes.astype(np.int16) + 128).astype(np.uint8), scales, zeros)
    outputs, inputs = as_lazy(tensors[layer + _SHAPE]).read()
    flat = np.stack([codes.reshape(-1) >> 4, codes.reshape(-1) & 15], axis=1).reshape(-1)
    return IntegerMatrix(flat[: outputs * inputs].reshape(outputs, inputs), scales, zeros)
