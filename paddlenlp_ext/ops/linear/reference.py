"""Linear layer with an unquantized weight, in plain Paddle, on any device."""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.dispatch import is_on_cpu
from paddlenlp_ext.ops.tensor_utils import in_dtype


def linear_reference(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None = None) -> paddle.Tensor:
    """Compute `linear` with Paddle's matmul; cast bfloat16 weights on the CPU, where Paddle lacks a bfloat16 kernel."""
    if weight.dtype == paddle.bfloat16 and is_on_cpu(weight):
        weight = weight.astype("float32")
    y = paddle.matmul(x, weight, transpose_y=True)
    return y if bias is None else y + bias.astype(y.dtype)


def linear_input_gradient_reference(gradient: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
    """Return the input gradient (dL/dy) W [..., in] with Paddle's matmul, in the dtype of `gradient` [..., out]."""
    return paddle.matmul(gradient, in_dtype(weight, gradient.dtype))
