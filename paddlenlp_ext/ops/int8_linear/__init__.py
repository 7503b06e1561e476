"""Linear layer with a frozen quantized weight, and matmuls in 8-bit integers.

    y = q(x) Q(W)^T + bias,   dL/dx = q((dL/dy) S) C        Q(W) = S C

q rounds each block of 128 values of a row to integers from -127 to 127 times a scale. The scale is the largest
magnitude in the block divided by 127, as in Jetfire (arXiv:2403.12422). An outlier therefore affects only the values of
the same block. Q rounds rows of W, as in SwitchBack (arXiv:2304.13013): C are the integers and S the scales. The
products and sums of a block are exact, and blocks are added in order, so the results do not depend on the number of
threads. A weight in weight_only_int8 with one scale per row is used as stored. Other weights are dequantized and
rounded in each call. W and the bias have no gradient.

A row of x or of dL/dy with NaN or infinity gives a row of NaN.
"""

from __future__ import annotations

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.int8_linear.cpp import int8_input_gradient_cpp, int8_linear_cpp
from paddlenlp_ext.ops.int8_linear.reference import int8_input_gradient_reference, int8_linear_reference
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight

int8_linear_op = DispatchedOp(
    "int8 linear",
    cpp=(int8_linear_cpp, library.usable_in_fp32_or_bf16),
    reference=int8_linear_reference,
)
int8_input_gradient_op = DispatchedOp(
    "int8 linear's gradient",
    cpp=(int8_input_gradient_cpp, library.usable_in_fp32_or_bf16),
    reference=int8_input_gradient_reference,
)
"""Op that computes the input gradient. Arguments of a backend: (gradient [..., out], weight)."""


def int8_linear(x: paddle.Tensor, weight: QuantizedWeight, bias: paddle.Tensor | None = None) -> paddle.Tensor:
    """Map [..., in] to [..., out], float32.

    Args:
        x: [..., in], float32 or bfloat16.
        weight: [out, in], without zero points or reordered columns (`QuantizedWeight.is_plain`).
        bias: [out], frozen.
    """
    if x.stop_gradient or not paddle.is_grad_enabled():
        return int8_linear_op.choose(x)(x, weight, bias)
    return _Int8Linear.apply(x, weight, bias)


class _Int8Linear(PyLayer):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.weight, ctx.dtype, ctx.num_tensors = weight, x.dtype, 1 if bias is None else 2
        return int8_linear_op.choose(x)(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        with paddle.no_grad():
            x_gradient = int8_input_gradient_op.choose(gradient)(gradient, ctx.weight).astype(ctx.dtype)
        return (x_gradient, None)[: ctx.num_tensors]
