"""A product with a weight that stays packed.

    y = x W^T,   dL/dx = (dL/dy) W

Forward and backward dequantize W some rows at a time; no more of it than that ever stands in full precision. W itself
has no gradient.

Shapes: in/out features.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops import native
from paddlenlp_ext.ops.dequantize import QuantizedWeight, dequantize_rows, row_blocks
from paddlenlp_ext.ops.dispatch import Op, on_gpu_in_half
from paddlenlp_ext.ops.half import products_are_half, products_in_bf16
from paddlenlp_ext.ops.quantized_native import quantized_input_gradient_native, quantized_linear_native
from paddlenlp_ext.ops.triton.launch_4bit import on_gpu_with_triton, product_triton, takes_product
from paddlenlp_ext.ops.weight_only import is_for_kernel, weight_only_linear

_FEW = 2
"""Positions up to which the kernel that multiplies packed codes is the faster one (benchmarks/triton_dequantize.py)."""


def quantized_linear(x: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Map `x` [..., in] to [..., out]; its format is kept, or autocast's is given."""
    if x.stop_gradient or not paddle.is_grad_enabled():
        return linear_op(weight.algo).choose(x)(x, weight)
    return _QuantizedLinear.apply(x, weight)


class _QuantizedLinear(PyLayer):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight, ctx.dtype, ctx.half = weight, x.dtype, products_are_half()
        return linear_op(weight.algo).choose(x)(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        with paddle.no_grad():
            of_input = input_gradient_op.choose(gradient)
            with products_in_bf16() if ctx.half else nullcontext():
                return of_input(gradient, ctx.weight).astype(ctx.dtype)


def linear_reference(x: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """x W^T [..., out] in plain Paddle."""
    parts = [
        paddle.matmul(x, dequantize_rows(weight, first, last, x.dtype), transpose_y=True)
        for first, last in row_blocks(weight)
    ]
    return parts[0] if len(parts) == 1 else paddle.concat(parts, axis=-1)


def input_gradient_reference(gradient: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """(dL/dy) W [..., in] in plain Paddle; parts are summed in float32, in half precision dozens would lose digits."""
    total = None
    for first, last in row_blocks(weight):
        part = paddle.matmul(gradient[..., first:last], dequantize_rows(weight, first, last, gradient.dtype))
        if (first, last) == (0, weight.shape[0]):
            return part
        part = part if part.dtype == paddle.float32 else part.astype("float32")
        total = part if total is None else total.add_(part)
    return total


def linear_triton(x: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """x W^T [..., out]: for a few positions in one kernel, for many from dequantized rows."""
    (out, width), leading = weight.shape, x.shape[:-1]
    if math.prod(leading) > _FEW or not takes_product(weight):
        return linear_reference(x, weight)
    return product_triton(x.reshape([-1, width]), weight).reshape([*leading, out])


def linear_weight_only(x: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """x W^T [..., out] by Paddle's fused kernel; a weight that it cannot be given is dequantized by rows."""
    return weight_only_linear(x, weight) if is_for_kernel(weight) else linear_reference(x, weight)


_NATIVE = (quantized_linear_native, native.usable)
_FOUR_BIT = Op(
    "quantized linear (nf4, fp4)",
    triton=(linear_triton, on_gpu_with_triton),
    native=_NATIVE,
    reference=linear_reference,
)
_INTEGER = Op(
    "quantized linear (int8, int4)",
    weight_only=(linear_weight_only, on_gpu_in_half),
    native=_NATIVE,
    reference=linear_reference,
)
input_gradient_op = Op(
    "quantized linear's gradient",
    native=(quantized_input_gradient_native, native.usable),
    reference=input_gradient_reference,
)
"""(dL/dy) W: implementations take (gradient [..., out], weight)."""


def linear_op(algo: str) -> Op:
    """The op of x W^T: implementations take (x [..., in], weight)."""
    return _INTEGER if algo.startswith("weight_only") else _FOUR_BIT
