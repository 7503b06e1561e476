"""Rotary position embedding in plain Paddle, optimized for the CPU.

Shapes: B batch, S sequence, N heads, H head dimension, R rotated channels of a head.
"""

from __future__ import annotations

import functools

import numpy as np
import paddle
from paddle.autograd import PyLayer
from paddle.nn import functional as F

from paddlenlp_ext.ops.rope.reference import interleave


def rope_plain_cpu(
    x_BSNH: paddle.Tensor, cos_BSR: paddle.Tensor, sin_BSR: paddle.Tensor, interleaved: bool = False
) -> paddle.Tensor:
    """Rotate with a matmul by a signed permutation matrix, which maps each pair (a, b) to (-b, a).

    The result is bitwise equal to the reference. In Paddle on the CPU, slicing and concatenating the halves, or a
    broadcast product, would take ten times as long as the matmul.
    """
    return _Rope.apply(x_BSNH, cos_BSR, sin_BSR, interleaved)


class _Rope(PyLayer):
    @staticmethod
    def forward(ctx, x_BSNH, cos_BSR, sin_BSR, interleaved):
        # All layers share these tables. Saved interleaved or padded copies would take memory in each layer.
        ctx.save_for_backward(cos_BSR, sin_BSR)
        ctx.interleaved, ctx.matrix = interleaved, _rotation_matrix(x_BSNH.shape[-1], cos_BSR.shape[-1], interleaved)
        cos, sin = _tables_by_head(cos_BSR, sin_BSR, x_BSNH, interleaved)
        turned = paddle.matmul(x_BSNH, ctx.matrix)
        return (x_BSNH * cos).add_(turned.multiply_(sin))

    @staticmethod
    def backward(ctx, gradient_BSNH):
        cos_BSR, sin_BSR = ctx.saved_tensor()
        cos, sin = _tables_by_head(cos_BSR, sin_BSR, gradient_BSNH, ctx.interleaved)
        turned_back = paddle.matmul(gradient_BSNH * sin, ctx.matrix, transpose_y=True)
        return (gradient_BSNH * cos).add_(turned_back), None, None


def _tables_by_head(
    cos_BSR: paddle.Tensor, sin_BSR: paddle.Tensor, like_BSNH: paddle.Tensor, interleaved: bool
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the tables [B, S, N, H], which leave the channels R to H - 1 unchanged."""
    if interleaved:
        cos_BSR, sin_BSR = interleave(cos_BSR), interleave(sin_BSR)
    head_dim = like_BSNH.shape[-1]
    padded = _padded(cos_BSR, head_dim, 1.0), _padded(sin_BSR, head_dim, 0.0)
    return _per_head(padded[0], like_BSNH), _per_head(padded[1], like_BSNH)


def _padded(table_BSR: paddle.Tensor, head_dim: int, value: float) -> paddle.Tensor:
    missing = head_dim - table_BSR.shape[-1]
    return F.pad(table_BSR, [0, missing], value=value) if missing else table_BSR


def _per_head(table_BSH: paddle.Tensor, like_BSNH: paddle.Tensor) -> paddle.Tensor:
    return table_BSH.unsqueeze(2).expand(like_BSNH.shape).contiguous()


@functools.cache
def _rotation_matrix(head_dim: int, rotary_dim: int, interleaved: bool) -> paddle.Tensor:
    """Return the matrix [H, H] that maps the channels (x[i], x[j]) of each pair (i, j) to (-x[j], x[i])."""
    channels = np.arange(rotary_dim)
    pairs = channels.reshape(-1, 2) if interleaved else channels.reshape(2, -1).T
    first, second = pairs.T
    matrix = np.zeros((head_dim, head_dim), np.float32)
    matrix[second, first], matrix[first, second] = -1, 1
    return paddle.to_tensor(matrix, place=paddle.CPUPlace())
