"""Kimi delta rule in plain Paddle, on any device.

Chunks are short, because the differences of c take C * C * H values per chunk and head. The backward pass saves only
the states between chunks, and differentiates each chunk again. In a static graph, the positions of a row are one chunk,
which consists of several blocks.

Shapes: T positions, R documents, N heads, H key dimension, E value dimension, L chunks of a level, M blocks of a chunk,
C positions of a chunk or of a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.gated_delta_rule.chunked_recurrence import to_chunks, to_positions
from paddlenlp_ext.ops.gated_delta_rule.document_chunks import document_chunks
from paddlenlp_ext.ops.gated_delta_rule.reference import normalized
from paddlenlp_ext.ops.tensor_utils import gather_rows
from paddlenlp_ext.paddle_compat import axis_sizes, is_symbolic

CHUNK = 16
"""Number of positions of a chunk, or of a block in a static graph; a power of 2."""


def kimi_delta_rule_reference(
    q_TNH: paddle.Tensor,
    k_TNH: paddle.Tensor,
    v_TNE: paddle.Tensor,
    decay_TNH: paddle.Tensor,
    beta_TN: paddle.Tensor,
    layout: AttentionLayout,
    initial_RNHE: paddle.Tensor | None = None,
    overwrites: bool = False,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Compute `kimi_delta_rule` in chunks, in the dtype of the decays; no states are overwritten."""
    dtype = decay_TNH.dtype
    with paddle.amp.auto_cast(enable=False):
        q_TNH, k_TNH = (normalized(x.astype(dtype), x.shape[1]) for x in (q_TNH, k_TNH))
        q_TNH = q_TNH * q_TNH.shape[2] ** -0.5
        inputs = q_TNH, k_TNH, v_TNE.astype(dtype), decay_TNH, beta_TN.astype(dtype)
        chunks = document_chunks(layout, CHUNK)
        factors = [to_chunks(x, chunks) for x in inputs]
        run = _outputs if is_symbolic(v_TNE) else _Chunks.apply
        outputs, finals = [], []
        after_LNHE = initial_RNHE
        if after_LNHE is None:
            after_LNHE = paddle.zeros([len(layout.documents()[0]), *k_TNH.shape[1:], v_TNE.shape[2]], dtype)
        for level in chunks.levels:
            before_LNHE = gather_rows(after_LNHE, level.previous)
            o_LNCE, after_LNHE = run(before_LNHE, *(x[level.chunks] for x in factors))
            outputs.append(o_LNCE)
            finals.append(gather_rows(after_LNHE, level.ending))
        o_TNE = to_positions(paddle.concat(outputs), chunks).astype(v_TNE.dtype)
        return o_TNE, gather_rows(paddle.concat(finals), chunks.order)


class _Chunks(PyLayer):
    """Chunks of a level; the backward pass computes the chunks again."""

    @staticmethod
    def forward(ctx: Any, *inputs: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        ctx.save_for_backward(*inputs)
        ctx.needs_grad = [not x.stop_gradient for x in inputs]
        return _outputs(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: paddle.Tensor) -> tuple[paddle.Tensor | None, ...]:
        inputs = [x.detach() for x in ctx.saved_tensor()]
        for x, needs_grad in zip(inputs, ctx.needs_grad, strict=True):
            x.stop_gradient = not needs_grad
        with paddle.enable_grad(), paddle.amp.auto_cast(enable=False):
            outputs = _outputs(*inputs)
            found = iter(paddle.grad(outputs, [x for x in inputs if not x.stop_gradient], gradients))
        return tuple(next(found) if needs_grad else None for needs_grad in ctx.needs_grad)


def _outputs(
    before_LNHE: paddle.Tensor,
    q_LNCH: paddle.Tensor,
    k_LNCH: paddle.Tensor,
    v_LNCE: paddle.Tensor,
    decay_LNCH: paddle.Tensor,
    beta_LNC: paddle.Tensor,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the outputs [L, N, C, E], and the states after the chunks [L, N, H, E]."""
    dtype, beta_LNC1 = decay_LNCH.dtype, beta_LNC.unsqueeze(-1)
    sums_LNCH = decay_LNCH.astype("float64").cumsum(2)
    p_LNCC, kk_LNCC = (_pairs if is_symbolic(k_LNCH) else _pairs_of_a_block)(q_LNCH, k_LNCH, sums_LNCH)
    since_start, until_end = (paddle.exp(x.astype(dtype)) for x in (sums_LNCH, sums_LNCH[:, :, -1:] - sums_LNCH))
    u_LNCE = _solve(beta_LNC1 * kk_LNCC, beta_LNC1 * (v_LNCE - (since_start * k_LNCH) @ before_LNHE))
    o_LNCE = (since_start * q_LNCH) @ before_LNHE + p_LNCC @ u_LNCE
    kept_LNHE = since_start[:, :, -1].unsqueeze(-1) * before_LNHE
    return o_LNCE, kept_LNHE + (until_end * k_LNCH).transpose([0, 1, 3, 2]) @ u_LNCE


def _pairs_of_a_block(
    q_LNCH: paddle.Tensor, k_LNCH: paddle.Tensor, sums_LNCH: paddle.Tensor
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return P [..., C, C], and A without beta; the axes before C may be others than L and N."""
    differences = sums_LNCH.unsqueeze(-2) - sums_LNCH.unsqueeze(-3)
    # keys, with their decays until the position of each query
    k_LNCCH = k_LNCH.unsqueeze(-3) * paddle.exp(differences.clip(max=0).astype(k_LNCH.dtype))
    p_LNCC, kk_LNCC = ((x_LNCH.unsqueeze(-2) * k_LNCCH).sum(-1) for x_LNCH in (q_LNCH, k_LNCH))
    return paddle.tril(p_LNCC), paddle.tril(kk_LNCC, -1)


def _pairs(
    q_LNCH: paddle.Tensor, k_LNCH: paddle.Tensor, sums_LNCH: paddle.Tensor
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return P and A without beta for chunks of a static graph, which have M blocks of `CHUNK` positions.

    Between two blocks, e^(c_i - c_j) is a product of three decays: since the start of the block of i, between the
    blocks, and until the end of the block of j.
    """
    size, channels = axis_sizes(k_LNCH)[2], k_LNCH.shape[3]
    blocks = [x.reshape([0, 0, -1, CHUNK, channels]) for x in (q_LNCH, k_LNCH, sums_LNCH)]
    q_LNMCH, k_LNMCH, sums_LNMCH = blocks
    ends_LNMH = sums_LNMCH[:, :, :, -1]
    starts_LNMH = paddle.concat([paddle.zeros_like(ends_LNMH[:, :, :1]), ends_LNMH[:, :, :-1]], 2)
    between_LNMMH = (starts_LNMH.unsqueeze(3) - ends_LNMH.unsqueeze(2)).clip(max=0)
    exponents = sums_LNMCH - starts_LNMH.unsqueeze(3), between_LNMMH, ends_LNMH.unsqueeze(3) - sums_LNMCH
    since, between, until = (paddle.exp(x.astype(k_LNCH.dtype)) for x in exponents)
    keys_LN1MHC = (until * k_LNMCH).transpose([0, 1, 2, 4, 3]).unsqueeze(2)
    index_M = paddle.arange(size // CHUNK)
    is_own_MM11 = (index_M.unsqueeze(1) == index_M).unsqueeze([2, 3])
    pairs = []
    for x_LNMCH, own_LNMCC in zip((q_LNMCH, k_LNMCH), _pairs_of_a_block(*blocks), strict=True):
        other_LNMMCC = ((since * x_LNMCH).unsqueeze(3) * between.unsqueeze(4)) @ keys_LN1MHC
        joined_LNMMCC = paddle.where(is_own_MM11, own_LNMCC.unsqueeze(3), other_LNMMCC)
        pairs.append(paddle.tril(joined_LNMMCC.transpose([0, 1, 2, 4, 3, 5]).reshape([0, 0, size, size])))
    return pairs[0], pairs[1]


def _solve(a_LNCC: paddle.Tensor, x_LNCE: paddle.Tensor) -> paddle.Tensor:
    """Return (I + A)^-1 X for strictly lower A.

    With T the inverses of the diagonal blocks of one size, and A' the part of A between two neighbouring blocks,
    T - T A' T has the inverses of blocks twice as large. Sums of the powers of A would cancel: for equal keys, the
    powers are much larger than the inverse.
    """
    if is_symbolic(a_LNCC):
        return paddle.linalg.triangular_solve(a_LNCC, x_LNCE, upper=False, unitriangular=True)
    positions = np.arange(a_LNCC.shape[-1])
    inverse = paddle.eye(len(positions), dtype=a_LNCC.dtype)
    for level in range((len(positions) - 1).bit_length()):
        block_C = positions >> level
        is_between_CC = (block_C[:, None] >> 1 == block_C >> 1) & (block_C[:, None] > block_C)
        between_LNCC = a_LNCC * paddle.to_tensor(is_between_CC.astype("float32")).astype(a_LNCC.dtype)
        inverse = inverse - inverse @ between_LNCC @ inverse
    return inverse @ x_LNCE
