"""Rotary position embedding in C++ (csrc/rope.cpp).

Shapes: B batch, S sequence, N heads, H head dimension, R rotated channels of a head.
"""

from __future__ import annotations

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.cpp.library import empty, function, pointer
from paddlenlp_ext.ops.tensor_utils import needs_grad


def rope_cpp(
    x_BSNH: paddle.Tensor, cos_BSR: paddle.Tensor, sin_BSR: paddle.Tensor, interleaved: bool = False
) -> paddle.Tensor:
    """Rotate every head in one pass; the backward pass needs only the saved cos and sin tables."""
    tables = cos_BSR.contiguous(), sin_BSR.contiguous()
    if needs_grad(x_BSNH):
        return _RopeCpp.apply(x_BSNH, *tables, interleaved)
    return _rotated(x_BSNH, *tables, interleaved, back=False)


class _RopeCpp(PyLayer):
    @staticmethod
    def forward(ctx, x_BSNH, cos_BSR, sin_BSR, interleaved):
        ctx.save_for_backward(cos_BSR, sin_BSR)
        ctx.interleaved = interleaved
        return _rotated(x_BSNH, cos_BSR, sin_BSR, interleaved, back=False)

    @staticmethod
    def backward(ctx, gradient_BSNH):
        cos_BSR, sin_BSR = ctx.saved_tensor()
        return _rotated(gradient_BSNH, cos_BSR, sin_BSR, ctx.interleaved, back=True), None, None


def _rotated(
    x_BSNH: paddle.Tensor, cos_BSR: paddle.Tensor, sin_BSR: paddle.Tensor, interleaved: bool, back: bool
) -> paddle.Tensor:
    x_BSNH, (batch, length, num_heads, head_dim) = x_BSNH.contiguous(), x_BSNH.shape
    rotary_dim = cos_BSR.shape[-1]
    assert cos_BSR.shape == sin_BSR.shape == [batch, length, rotary_dim], (
        "the tables must have the same batch size and length as x"
    )
    assert rotary_dim <= head_dim and rotary_dim % 2 == 0, f"{rotary_dim} of {head_dim} channels cannot be rotated"
    assert x_BSNH.dtype == cos_BSR.dtype == sin_BSR.dtype, "the tables must have the same dtype as x"
    out_BSNH = empty(x_BSNH.shape)
    inputs = pointer(x_BSNH), pointer(cos_BSR), pointer(sin_BSR)
    sizes = batch * length, num_heads, head_dim, rotary_dim
    function("rope_turn")(*inputs, interleaved, back, *sizes, pointer(out_BSNH))
    return out_BSNH
