"""Kimi delta rule: the gated delta rule with a decay for each channel of the keys (arXiv:2510.26692).

A head has a matrix S [H, E] as its state, zero or an initial state before the first position of a document. Queries and
keys are scaled to norm 1, and queries then by H^-0.5. At each position, with decays g <= 0 and 0 <= beta <= 1:

    S <- diag(e^g) S
    S <- S + k (beta (v - S^T k))^T
    o = S^T q

With c the sums of the decays of a chunk up to a position and S0 the state before the chunk, in the notation of
ops/gated_delta_rule/chunked_recurrence.py:

    P_ij = sum over channels h of q_ih k_jh e^(c_ih - c_jh) for i >= j, else 0
    A_ij = beta_i times the same with k_ih in place of q_ih, for i > j
    U = (I + A)^-1 beta (V - (e^c o K) S0)
    O = (e^c o Q) S0 + P U
    S1 = diag(e^(c_C)) S0 + (e^(c_C - c) o K)^T U

The op runs in plain Paddle on any device. Chunks are short, because the differences of c take C * C * H values per
chunk and head. The backward pass saves only the states between chunks, and differentiates each chunk again.

Shapes: T positions, R documents, N heads, H key dimension, E value dimension, L chunks of a level, C positions of a
chunk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.gated_delta_rule.chunked_recurrence import to_chunks, to_positions
from paddlenlp_ext.ops.gated_delta_rule.document_chunks import document_chunks
from paddlenlp_ext.ops.gated_delta_rule.reference import normalized
from paddlenlp_ext.ops.tensor_utils import gather_rows

CHUNK = 16
"""Number of positions of a chunk, a power of 2."""


def kimi_delta_rule(
    q_TNH: paddle.Tensor,
    k_TNH: paddle.Tensor,
    v_TNE: paddle.Tensor,
    decay_TNH: paddle.Tensor,
    beta_TN: paddle.Tensor,
    layout: Any,
    initial_RNHE: paddle.Tensor | None = None,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the outputs [T, N, E] in the dtype of `v_TNE`, and the states after the documents [R, N, H, E].

    A document with a parent starts from the state after the parent. The op computes in float32, and is differentiable
    with respect to all tensors.

    Args:
        q_TNH: queries of the documents of `layout`, one after another.
        k_TNH: keys.
        v_TNE: values.
        decay_TNH: logarithms of the decays, at most 0, float32.
        beta_TN: beta.
        layout: documents of the batch.
        initial_RNHE: states before the documents, float32; None for zeros. The op ignores the states of documents with
            a parent.
    """
    with paddle.amp.auto_cast(enable=False):
        q_TNH, k_TNH = (normalized(x.astype("float32"), x.shape[1]) for x in (q_TNH, k_TNH))
        q_TNH = q_TNH * q_TNH.shape[2] ** -0.5
        inputs = q_TNH, k_TNH, v_TNE.astype("float32"), decay_TNH, beta_TN.astype("float32")
        chunks = document_chunks(layout, CHUNK)
        factors = [to_chunks(x, chunks) for x in inputs]
        outputs, finals = [], []
        after_LNHE = initial_RNHE
        if after_LNHE is None:
            after_LNHE = paddle.zeros([len(layout.documents()[0]), *k_TNH.shape[1:], v_TNE.shape[2]], "float32")
        for level in chunks.levels:
            before_LNHE = gather_rows(after_LNHE, level.previous)
            o_LNCE, after_LNHE = _Chunks.apply(before_LNHE, *(x[level.chunks] for x in factors))
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
    sums_LNCH, beta_LNC1 = decay_LNCH.astype("float64").cumsum(2), beta_LNC.unsqueeze(-1)
    differences = sums_LNCH.unsqueeze(3) - sums_LNCH.unsqueeze(2)
    k_LNCCH = k_LNCH.unsqueeze(2) * paddle.exp(
        differences.clip(max=0).astype("float32")
    )  # keys, as each query sees them
    p_LNCC = paddle.tril((q_LNCH.unsqueeze(3) * k_LNCCH).sum(-1))
    a_LNCC = beta_LNC1 * paddle.tril((k_LNCH.unsqueeze(3) * k_LNCCH).sum(-1), -1)
    since_start, until_end = (paddle.exp(x.astype("float32")) for x in (sums_LNCH, sums_LNCH[:, :, -1:] - sums_LNCH))
    u_LNCE = _solve(a_LNCC, beta_LNC1 * (v_LNCE - (since_start * k_LNCH) @ before_LNHE))
    o_LNCE = (since_start * q_LNCH) @ before_LNHE + p_LNCC @ u_LNCE
    kept_LNHE = since_start[:, :, -1].unsqueeze(-1) * before_LNHE
    return o_LNCE, kept_LNHE + (until_end * k_LNCH).transpose([0, 1, 3, 2]) @ u_LNCE


def _solve(a_LNCC: paddle.Tensor, x_LNCE: paddle.Tensor) -> paddle.Tensor:
    """Return (I + A)^-1 X for strictly lower A.

    With T the inverses of the diagonal blocks of one size, and A' the part of A between two neighbouring blocks,
    T - T A' T has the inverses of blocks twice as large. Sums of the powers of A would cancel: for equal keys, the
    powers are much larger than the inverse.
    """
    positions = np.arange(a_LNCC.shape[-1])
    inverse = paddle.eye(len(positions), dtype=a_LNCC.dtype)
    for level in range((len(positions) - 1).bit_length()):
        block_C = positions >> level
        is_between_CC = (block_C[:, None] >> 1 == block_C >> 1) & (block_C[:, None] > block_C)
        between_LNCC = a_LNCC * paddle.to_tensor(is_between_CC.astype("float32"))
        inverse = inverse - inverse @ between_LNCC @ inverse
    return inverse @ x_LNCE
