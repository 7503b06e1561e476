"""Linear layer with a quantized weight.

    y = x W^T,   dL/dx = (dL/dy) W

Without a fused kernel, the forward and backward passes dequantize W in chunks of rows, so that only one dequantized
chunk is in memory at a time. W has no gradient.

Shapes: in/out features of the weight.
"""

from __future__ import annotations

from contextlib import nullcontext

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.cpp.bf16 import bf16_matmuls, bf16_matmuls_enabled
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.quantized_linear.cpp import quantized_input_gradient_cpp, quantized_linear_cpp
from paddlenlp_ext.ops.quantized_linear.reference import quantized_input_gradient_reference, quantized_linear_reference
from paddlenlp_ext.ops.quantized_linear.triton import quantized_linear_triton
from paddlenlp_ext.ops.quantized_linear.weight_only import (
    fits_kernel,
    on_gpu_with_weight_only_kernel,
    quantized_linear_weight_only,
)
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.ops.quantized_weight.triton import on_gpu_in_4_bits
from paddlenlp_ext.paddle_compat import is_symbolic


def quantized_linear(x: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Return x W^T [..., out] for x [..., in], in the dtype of x or the autocast dtype."""
    if x.stop_gradient or not paddle.is_grad_enabled() or is_symbolic(x):
        return quantized_linear_op(weight.algo).choose(x)(x, weight)
    return _QuantizedLinear.apply(x, weight)


class _QuantizedLinear(PyLayer):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight, ctx.dtype, ctx.in_bf16 = weight, x.dtype, bf16_matmuls_enabled()
        return quantized_linear_op(weight.algo).choose(x)(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        with paddle.no_grad():
            input_gradient = quantized_input_gradient_op.choose(gradient)
            with bf16_matmuls() if ctx.in_bf16 else nullcontext():
                return input_gradient(gradient, ctx.weight).astype(ctx.dtype)


def takes_weight_only(x: paddle.Tensor, weight: QuantizedWeight) -> bool:
    """Return whether `quantized_linear` uses Paddle's weight-only kernel for `x` and this weight."""
    return quantized_linear_op(weight.algo).choose(x) is quantized_linear_weight_only and fits_kernel(weight)


_CPP = (quantized_linear_cpp, library.with_products(library.usable))

_FOUR_BIT = DispatchedOp(
    "quantized linear (nf4, fp4)",
    triton=(quantized_linear_triton, on_gpu_in_4_bits),
    cpp=_CPP,
    reference=quantized_linear_reference,
)

_INTEGER = DispatchedOp(
    "quantized linear (int8, int4)",
    weight_only=(quantized_linear_weight_only, on_gpu_with_weight_only_kernel),
    cpp=_CPP,
    reference=quantized_linear_reference,
)

quantized_input_gradient_op = DispatchedOp(
    "quantized linear's gradient",
    cpp=(quantized_input_gradient_cpp, library.with_products(library.usable_in_fp32_or_bf16)),
    reference=quantized_input_gradient_reference,
)
"""Op that computes the input gradient (dL/dy) W. Arguments of a backend: (gradient [..., out], weight)."""


def quantized_linear_op(algo: str) -> DispatchedOp:
    """Return the op that computes x W^T for a quantization format. Arguments of a backend: (x [..., in], weight)."""
    return _INTEGER if algo.startswith("weight_only") else _FOUR_BIT
