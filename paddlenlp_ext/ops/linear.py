"""A dense layer, `x @ weight^T + bias`."""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops import native
from paddlenlp_ext.ops.dispatch import Op
from paddlenlp_ext.ops.linear_native import linear_native


def linear_reference(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None = None) -> paddle.Tensor:
    """Paddle's matmul; a weight in bfloat16 on the CPU, where that has no kernel, is widened for it."""
    if weight.dtype == paddle.bfloat16 and weight.place.is_cpu_place():
        weight = weight.astype("float32")
    y = paddle.matmul(x, weight, transpose_y=True)
    return y if bias is None else y + bias.astype(y.dtype)


linear_op = Op("linear", native=(linear_native, native.usable), reference=linear_reference)


def linear(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None = None) -> paddle.Tensor:
    """Map [..., in] to [..., out].

    Args:
        x: [..., in].
        weight: [out, in]; on the CPU it may be bfloat16 (frozen) beside an x in float32.
        bias: [out].

    Returns:
        [..., out] in the format that the product gives: under autocast half, on the CPU always float32.
    """
    return linear_op.choose(x)(x, weight, bias)
