"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), with the dimension pairs (i, i + H/2) of Hugging Face.

    (x[i], x[i + H/2]) -> (x[i] cos - x[i + H/2] sin, x[i + H/2] cos + x[i] sin)

Shapes: B batch, S sequence, N heads, H head dimension.
"""

from __future__ import annotations

import functools

import numpy as np
import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.cpu.library import empty, function, needs_grad, pointer, usable
from paddlenlp_ext.ops.dispatch import DispatchedOp, on_cpu_in_fp32


def rope_reference(x_BSNH: paddle.Tensor, cos_BSH: paddle.Tensor, sin_BSH: paddle.Tensor) -> paddle.Tensor:
    """Rotate each pair (x[i], x[i + H/2]) by its angle in fp32."""
    x = x_BSNH.astype("float32")
    first, second = paddle.chunk(x, 2, axis=-1)
    turned = paddle.concat([-second, first], axis=-1)
    return (x * cos_BSH.unsqueeze(2) + turned * sin_BSH.unsqueeze(2)).astype(x_BSNH.dtype)


def rope_cpu(x_BSNH: paddle.Tensor, cos_BSH: paddle.Tensor, sin_BSH: paddle.Tensor) -> paddle.Tensor:
    """Rotate with a matmul by a signed permutation, which swaps the halves exactly; the bits equal the reference's.

    On the CPU, Paddle takes ten times as long to slice and concatenate the halves, or to compute a broadcast product.
    """
    return _Rope.apply(x_BSNH, cos_BSH, sin_BSH)


class _Rope(PyLayer):
    @staticmethod
    def forward(ctx, x_BSNH, cos_BSH, sin_BSH):
        ctx.save_for_backward(cos_BSH, sin_BSH)
        cos, sin = _per_head(cos_BSH, x_BSNH), _per_head(sin_BSH, x_BSNH)
        turned = paddle.matmul(x_BSNH, _rotation_matrix(x_BSNH.shape[-1]))
        return (x_BSNH * cos).add_(turned.multiply_(sin))

    @staticmethod
    def backward(ctx, gradient_BSNH):
        cos_BSH, sin_BSH = ctx.saved_tensor()
        cos, sin = _per_head(cos_BSH, gradient_BSNH), _per_head(sin_BSH, gradient_BSNH)
        turned_back = paddle.matmul(gradient_BSNH * sin, _rotation_matrix(gradient_BSNH.shape[-1]), transpose_y=True)
        return (gradient_BSNH * cos).add_(turned_back), None, None


def _per_head(table_BSH: paddle.Tensor, like_BSNH: paddle.Tensor) -> paddle.Tensor:
    """Repeat a table for every head of `like_BSNH`."""
    return table_BSH.unsqueeze(2).expand(like_BSNH.shape).contiguous()


@functools.cache
def _rotation_matrix(head_dim: int) -> paddle.Tensor:
    """Return the matrix [H, H] for which x @ matrix is (-second half, first half)."""
    half = np.eye(head_dim // 2, dtype=np.float32)
    zero = np.zeros_like(half)
    return paddle.to_tensor(np.block([[zero, half], [-half, zero]]), place=paddle.CPUPlace())


def rope_cpp(x_BSNH: paddle.Tensor, cos_BSH: paddle.Tensor, sin_BSH: paddle.Tensor) -> paddle.Tensor:
    """Rotate in one pass of C++ (csrc/rope.cpp); only the tables are saved for the backward pass."""
    tables = cos_BSH.contiguous(), sin_BSH.contiguous()
    if needs_grad(x_BSNH):
        return _RopeCpp.apply(x_BSNH, *tables)
    return _rotated(x_BSNH, *tables, back=False)


class _RopeCpp(PyLayer):
    @staticmethod
    def forward(ctx, x_BSNH, cos_BSH, sin_BSH):
        ctx.save_for_backward(cos_BSH, sin_BSH)
        return _rotated(x_BSNH, cos_BSH, sin_BSH, back=False)

    @staticmethod
    def backward(ctx, gradient_BSNH):
        return _rotated(gradient_BSNH, *ctx.saved_tensor(), back=True), None, None


def _rotated(x_BSNH: paddle.Tensor, cos_BSH: paddle.Tensor, sin_BSH: paddle.Tensor, back: bool) -> paddle.Tensor:
    x_BSNH, (batch, length, num_heads, head_dim) = x_BSNH.contiguous(), x_BSNH.shape
    assert cos_BSH.shape == sin_BSH.shape == [batch, length, head_dim], "the tables' shape does not match x"
    assert x_BSNH.dtype == cos_BSH.dtype == sin_BSH.dtype, "the tables' dtype does not match x"
    out_BSNH = empty(x_BSNH.shape)
    inputs = pointer(x_BSNH), pointer(cos_BSH), pointer(sin_BSH)
    function("rope_turn")(*inputs, back, batch * length, num_heads, head_dim, pointer(out_BSNH))
    return out_BSNH


rope_op = DispatchedOp("rope", native=(rope_cpp, usable), cpu=(rope_cpu, on_cpu_in_fp32), reference=rope_reference)


def apply_rope(x_BSNH: paddle.Tensor, cos_BSH: paddle.Tensor, sin_BSH: paddle.Tensor) -> paddle.Tensor:
    """Rotate every head of `x_BSNH` by the tables of `nn.rope.RotaryEmbedding`."""
    return rope_op.choose(x_BSNH)(x_BSNH, cos_BSH, sin_BSH)
