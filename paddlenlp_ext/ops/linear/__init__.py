"""Linear layer with an unquantized weight, `x W^T + bias`."""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.linear.cpp import linear_cpp, linear_input_gradient_cpp
from paddlenlp_ext.ops.linear.reference import linear_input_gradient_reference, linear_reference

linear_op = DispatchedOp("linear", cpp=(linear_cpp, library.with_products(library.usable)), reference=linear_reference)
linear_input_gradient_op = DispatchedOp(
    "linear's gradient",
    cpp=(linear_input_gradient_cpp, library.with_products(library.usable_in_fp32_or_bf16)),
    reference=linear_input_gradient_reference,
)
"""Op that computes (dL/dy) W, the input gradient, without autograd. Arguments of a backend: (gradient, weight)."""


def linear(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None = None) -> paddle.Tensor:
    """Map [..., in] to [..., out] as `x W^T + bias`.

    Args:
        x: [..., in].
        weight: [out, in]. On the CPU a bfloat16 weight is multiplied with float32 x, and gets a bfloat16 gradient.
        bias: [out].

    Returns:
        [..., out]: float32 on the CPU; on a GPU in the dtype of x, or in half precision under autocast.
    """
    return linear_op.choose(x)(x, weight, bias)
