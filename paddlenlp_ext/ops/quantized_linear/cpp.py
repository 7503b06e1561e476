"""Linear layer with a quantized weight in C++ (csrc/quantized_linear.cpp)."""

from __future__ import annotations

import math

import paddle

from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.cpp.bf16 import as_bf16, cached_bf16, uses_bf16
from paddlenlp_ext.ops.quantized_linear.act_order_and_zero_points import (
    input_gradient_with_zero_points,
    linear_with_zero_points,
)
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.ops.quantized_weight.cpp import packed
from paddlenlp_ext.ops.tensor_utils import contiguous


def quantized_linear_cpp(x: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Return x W^T [..., out] for float32 x [..., in], without autograd.

    Raises:
        ValueError: the last axis of x does not match the weight.
    """
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"quantized_linear: shapes do not match: x {list(x.shape)} with a weight of shape {list(weight.shape)}"
        )
    if not weight.is_plain:
        return linear_with_zero_points(quantized_linear_cpp, x, weight)
    x, rows = contiguous(x), math.prod(x.shape[:-1])
    y = library.empty([*x.shape[:-1], weight.shape[0]])
    if rows <= library.small_batch_rows(uses_bf16(weight)):
        run = library.function("quantized_linear_small_batch")
        run(library.pointer(x), packed(weight), library.pointer(y), rows)
        return y
    operand = cached_bf16(x) if uses_bf16(weight) else x
    _call("quantized_linear_forward", operand, weight, y)
    return y


def quantized_input_gradient_cpp(gradient: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Return the input gradient (dL/dy) W, float32 [..., in], for a float32 or bfloat16 dL/dy [..., out]."""
    if not weight.is_plain:
        return input_gradient_with_zero_points(quantized_input_gradient_cpp, gradient, weight)
    gradient = contiguous(gradient)
    operand = as_bf16(gradient) if uses_bf16(weight) else gradient
    x_gradient = library.empty([*gradient.shape[:-1], weight.shape[1]])
    _call("quantized_linear_input_gradient", operand, weight, x_gradient, False)
    return x_gradient


def _call(name: str, operand: paddle.Tensor, weight: QuantizedWeight, out: paddle.Tensor, *flags: bool) -> None:
    run = library.function(name)
    in_bf16, rows = operand.dtype == paddle.bfloat16, math.prod(operand.shape[:-1])
    run(library.pointer(operand), packed(weight), library.pointer(out), rows, *flags, in_bf16)
