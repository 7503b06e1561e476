"""Linear layer in 8-bit integers in plain Paddle, on any device; float64 matmuls of the integers are exact."""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight

BLOCK = 128
"""Number of consecutive values of a row of x or dL/dy that share a scale, as in csrc/int8_vnni_product.h."""
_LARGEST = 127.0


def int8_linear_reference(
    x: paddle.Tensor, weight: QuantizedWeight, bias: paddle.Tensor | None = None
) -> paddle.Tensor:
    """Return q(x) q(W)^T + bias, float32 [..., out]."""
    codes, scales = _integers(weight)
    y = (paddle.matmul(_rounded_blocks(x), codes, transpose_y=True) * scales.reshape([-1])).astype("float32")
    return y if bias is None else y + bias.astype("float32")


def int8_input_gradient_reference(gradient: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Return the input gradient, float32 [..., in], for dL/dy [..., out]."""
    codes, scales = _integers(weight)
    scaled = gradient.astype("float32") * scales.astype("float32").reshape([-1])
    return paddle.matmul(_rounded_blocks(scaled), codes).astype("float32")


def _integers(weight: QuantizedWeight) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the integers [out, in] and the scales [out, 1] of a weight rounded to int8, in float64."""
    if weight.algo == "weight_only_int8" and weight.block_size == weight.shape[1] and weight.group_size == 0:
        codes, scales = weight.codes.reshape(list(weight.shape)), weight.scales.reshape([-1, 1])
        return codes.astype("float64"), scales.astype("float64")
    return _rounded(dequantize(weight))


def _rounded_blocks(x: paddle.Tensor) -> paddle.Tensor:
    """Return x [..., width] with each block of the last axis rounded to integers times a scale, in float64."""
    parts = [_rounded(x[..., first : first + BLOCK]) for first in range(0, x.shape[-1], BLOCK)]
    return paddle.concat([integers * scales for integers, scales in parts], axis=-1)


def _rounded(x: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return integers [..., width] and scales [..., 1] of the rows of x, in float64.

    The scale of a row with NaN or infinity is NaN. A row whose largest magnitude is below 1e-36 is rounded to 0,
    because 127 divided by the magnitude would overflow.
    """
    x = x.astype("float32")
    largest = x.abs().max(axis=-1, keepdim=True)
    is_finite = paddle.isfinite(x).all(axis=-1, keepdim=True)
    is_zero = paddle.logical_or(largest < 1e-36, paddle.logical_not(is_finite))
    ones = paddle.ones_like(largest)
    integers = paddle.round(x * (_LARGEST / paddle.where(is_zero, ones, largest)))
    scales = paddle.where(is_finite, largest / _LARGEST, paddle.full_like(largest, float("nan")))
    return paddle.where(is_zero, paddle.zeros_like(x), integers).astype("float64"), scales.astype("float64")
