"""Tensors of a weight_only_int8 or weight_only_int4 weight, in this package's layout.

    weight          int8 [out, in], or uint8 [ceil(N / 2)], two codes per byte
    weight_scale    float32 [out, B / out]
    weight_shape    int64 [2], only for int4
    weight_zero     int16 [out, B / out], zero points; absent if all are 0
    weight_order    int32 [in], input index of each column; absent if the columns are in order

Shapes: N = out * in weights; B = ceil(N / block) scales.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.checkpoint.quantized_formats.packed_layout import INTEGER_PARTS
from paddlenlp_ext.checkpoint.safetensors import LazyTensor, as_lazy
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight

SCALE, _SHAPE, _ZERO, _ORDER = INTEGER_PARTS


def integer_tensors(layer: str, weight: QuantizedWeight) -> dict[str, Any]:
    """Return a dict of the tensors that store a layer's quantized weight, keyed by their full names."""
    assert weight.group_scales is None, "integer formats must not have double quantization"
    out, codes = weight.shape[0], weight.codes
    scales: dict[str, Any] = {layer + SCALE: _shaped(weight.scales, (out, weight.scales.size // out))}
    if weight.zeros is not None:
        scales[layer + _ZERO] = _shaped(weight.zeros, (out, weight.zeros.size // out))
    if weight.order is not None:
        scales[layer + _ORDER] = weight.order
    if weight.algo == "weight_only_int8":
        return {f"{layer}.weight": _shaped(codes, weight.shape), **scales}
    return {f"{layer}.weight": codes, **scales, layer + _SHAPE: np.array(weight.shape, np.int64)}


def _shaped(tensor: paddle.Tensor, shape: tuple[int, ...]) -> LazyTensor:
    stored = as_lazy(tensor)
    return LazyTensor(shape, stored.dtype, lambda: stored.read().reshape(shape))


def integer_shape(layer: str, algo: str, source: WeightSource) -> tuple[int, int]:
    """Return the shape [out, in] of an integer weight without reading its codes."""
    is_int8 = algo == "weight_only_int8"
    out, width = source.shape(f"{layer}.weight") if is_int8 else source.read(layer + _SHAPE)
    return int(out), int(width)


def read_integers(layer: str, algo: str, source: WeightSource) -> QuantizedWeight:
    """Read the weight of a layer in an integer format.

    Raises:
        KeyError: a tensor is missing.
        ValueError: `weight_order` is not a permutation of the columns.
    """
    shape, scales = integer_shape(layer, algo, source), source.read(layer + SCALE, "float32")
    codes = paddle.to_tensor(source.read(f"{layer}.weight")).flatten()
    zeros, order = _optional(source, layer + _ZERO), _optional(source, layer + _ORDER)
    # For a damaged file, the quotient may be 0. `read_stored` then reports a wrong number of scales.
    block = max(shape[1] // max(scales.size // shape[0], 1), 1)
    if order is not None and not np.array_equal(np.sort(order), np.arange(shape[1])):
        raise ValueError(
            f"{source.path}: {layer}{_ORDER} is not a permutation of the {shape[1]} inputs; download or save the model "
            "again"
        )
    return QuantizedWeight(
        *(algo, shape, block, codes, paddle.to_tensor(scales).flatten()),
        zeros=None if zeros is None or not zeros.any() else paddle.to_tensor(zeros).flatten(),
        order=None if order is None or bool((order == np.arange(shape[1])).all()) else paddle.to_tensor(order),
    )


def _optional(source: WeightSource, name: str) -> np.ndarray | None:
    try:
        return source.read(name)
    except KeyError:
        return None
