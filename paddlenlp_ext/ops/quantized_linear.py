"""A product with a weight that stays packed.

    y = x W^T,   dL/dx = (dL/dy) W

Forward and backward dequantize W some rows at a time; no more of it than that ever stands in full precision. W itself
has no gradient.

Shapes: T positions, in/out features.
"""

from __future__ import annotations

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.dequantize import QuantizedWeight, dequantize_rows, row_blocks
from paddlenlp_ext.ops.dispatch import Op, on_gpu_in_half
from paddlenlp_ext.ops.triton.launch_4bit import on_gpu_with_triton, product_triton
from paddlenlp_ext.ops.weight_only import weight_only_linear

_FEW = 32
"""Positions up to which reading the packed weight once is what takes the time."""


def quantized_linear(x: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Map `x` [..., in] to [..., out]; its format is kept, or autocast's is given."""
    out, width = weight.shape
    return _QuantizedLinear.apply(x.reshape([-1, width]), weight).reshape([*x.shape[:-1], out])


class _QuantizedLinear(PyLayer):
    @staticmethod
    def forward(ctx, x_TI, weight):
        ctx.weight, ctx.wanted, ctx.dtype = weight, not x_TI.stop_gradient, x_TI.dtype
        return linear_op(weight.algo).choose(x_TI)(x_TI, weight)

    @staticmethod
    def backward(ctx, gradient_TO):
        if not ctx.wanted:  # Paddle refuses a gradient that nobody wants
            return None
        with paddle.no_grad():
            gradient = input_gradient_op(ctx.weight.algo).choose(gradient_TO)
            return gradient(gradient_TO, ctx.weight).astype(ctx.dtype)


def linear_reference(x_TI: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """x W^T [T, out] in plain Paddle."""
    parts = [
        paddle.matmul(x_TI, dequantize_rows(weight, first, last).astype(x_TI.dtype), transpose_y=True)
        for first, last in row_blocks(weight)
    ]
    return parts[0] if len(parts) == 1 else paddle.concat(parts, axis=1)


def input_gradient_reference(gradient_TO: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """(dL/dy) W [T, in] in plain Paddle."""
    total = None
    for first, last in row_blocks(weight):
        rows = dequantize_rows(weight, first, last).astype(gradient_TO.dtype)
        part = paddle.matmul(gradient_TO[:, first:last], rows)
        total = part if total is None else total.add_(part)
    return total


def linear_triton(x_TI: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """x W^T [T, out]: for a few positions in one kernel, for many from dequantized rows."""
    if x_TI.shape[0] > _FEW or weight.shape[1] % 2:
        return linear_reference(x_TI, weight)
    return product_triton(x_TI, weight)


_FOUR_BIT = Op("quantized linear (nf4, fp4)", triton=(linear_triton, on_gpu_with_triton), reference=linear_reference)
_FOUR_BIT_GRADIENT = Op("quantized linear's gradient (nf4, fp4)", reference=input_gradient_reference)
_INTEGER = Op(
    "quantized linear (int8, int4)", weight_only=(weight_only_linear, on_gpu_in_half), reference=linear_reference
)
_INTEGER_GRADIENT = Op("quantized linear's gradient (int8, int4)", reference=input_gradient_reference)


def linear_op(algo: str) -> Op:
    """The op of x W^T: implementations take (x [T, in], weight)."""
    return _INTEGER if algo.startswith("weight_only") else _FOUR_BIT


def input_gradient_op(algo: str) -> Op:
    """The op of (dL/dy) W: implementations take (gradient [T, out], weight)."""
    return _INTEGER_GRADIENT if algo.startswith("weight_only") else _FOUR_BIT_GRADIENT
