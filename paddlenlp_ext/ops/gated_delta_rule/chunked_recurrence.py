"""Chunked recurrences in plain Paddle, on any device, with a hand-written backward pass.

With c_i the sum of the decays of a chunk up to position i and S0 the state before the chunk:

    D_ij = e^(c_i - c_j) for i >= j, else 0               P = D o (Q K^T)
    O = e^c Q S0 + P U
    S1 = e^(c_C) S0 + (e^(c_C - c) K)^T U                 state after the chunk

U are the rows that the chunk adds to the state. In state space duality (arXiv:2405.21060), U = V. In the gated delta
rule (arXiv:2412.06464), in the WY form of arXiv:2406.06484:

    A = strictly lower part of beta_i D_ij (k_i k_j)      T = (I + A)^-1
    U = T beta (V - e^c K S0)

The backward pass recomputes everything except the states between chunks. An exponent is never positive, and c is summed
in float64, because the difference of two long sums loses precision. Everything else is computed in the dtype of the
decays.

Shapes: T positions, R documents, N heads, H key dimension, E value dimension, M chunks, L chunks of a level,
C positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.gated_delta_rule.document_chunks import DocumentChunks, Level, document_chunks
from paddlenlp_ext.ops.tensor_utils import gather_rows
from paddlenlp_ext.paddle_compat import axis_sizes, is_symbolic


def chunked_recurrence(
    inputs: Sequence[paddle.Tensor], layout: AttentionLayout, initial_RNHE: paddle.Tensor | None
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the outputs [T, N, E] and the states after the documents [R, N, H, E]; autocast must be disabled.

    Args:
        inputs: q and k [T, N, H], v [T, N, E], decays [T, N], and in the gated delta rule beta [T, N], in one dtype.
        layout: documents of the batch.
        initial_RNHE: states before the documents without a parent; None for zeros.
    """
    _, k_TNH, v_TNE, decay_TN, *_ = inputs
    if initial_RNHE is None:
        count = len(layout.documents()[0])
        initial_RNHE = paddle.zeros([count, *k_TNH.shape[1:], v_TNE.shape[2]], decay_TN.dtype)
    chunks = document_chunks(layout)
    if is_symbolic(v_TNE):
        return _forward(chunks, initial_RNHE, inputs)[:2]
    return _ChunkedRecurrence.apply(chunks, initial_RNHE, *inputs)


def _forward(
    chunks: DocumentChunks, initial_RNHE: paddle.Tensor, inputs: Sequence[paddle.Tensor]
) -> tuple[paddle.Tensor, paddle.Tensor, list[paddle.Tensor]]:
    """Return the outputs, the states after the documents, and the states before the chunks of each level."""
    factors = _Factors.of_chunks(inputs, chunks)
    outputs, states, finals = [], [], []
    after_LNHE = initial_RNHE
    for level in chunks.levels:
        before_LNHE = gather_rows(after_LNHE, level.previous)
        o_LNCE, after_LNHE = factors.of_level(level).outputs(before_LNHE)
        outputs.append(o_LNCE)
        states.append(before_LNHE)
        finals.append(gather_rows(after_LNHE, level.ending))
    return to_positions(paddle.concat(outputs), chunks), gather_rows(paddle.concat(finals), chunks.order), states


class _ChunkedRecurrence(PyLayer):
    @staticmethod
    def forward(ctx, chunks, initial_RNHE, *inputs):
        o_TNE, final_RNHE, states = _forward(chunks, initial_RNHE, inputs)
        ctx.chunks, ctx.needs_grad = chunks, [not x.stop_gradient for x in (initial_RNHE, *inputs)]
        ctx.num_inputs = len(inputs)
        ctx.save_for_backward(*inputs, *states)
        return o_TNE, final_RNHE

    @staticmethod
    def backward(ctx, o_gradient_TNE, final_gradient_RNHE):
        saved, chunks = ctx.saved_tensor(), ctx.chunks
        inputs, states = saved[: ctx.num_inputs], saved[ctx.num_inputs :]
        with paddle.amp.auto_cast(enable=False):
            factors, o_gradient_MNCE = _Factors.of_chunks(inputs, chunks), to_chunks(o_gradient_TNE, chunks)
            gradients: list[tuple[paddle.Tensor, ...]] = []
            continued: list[tuple[np.ndarray, paddle.Tensor]] = []  # rows of the next level's gradient
            for level, before_LNHE in zip(reversed(chunks.levels), reversed(states), strict=True):
                ended = level.ending, gather_rows(final_gradient_RNHE, level.ended)
                after_gradient_LNHE = _sum_of_rows([ended, *continued], len(level.previous))
                of_level, before_gradient_LNHE = factors.of_level(level).gradients(
                    before_LNHE, o_gradient_MNCE[level.chunks], after_gradient_LNHE
                )
                gradients.append(of_level)
                continued = [(level.previous, before_gradient_LNHE)]
            columns = zip(*reversed(gradients), strict=True)
            of_initial_RNHE = _sum_of_rows(continued, len(final_gradient_RNHE))
            of_all = [of_initial_RNHE, *(to_positions(paddle.concat(column), chunks) for column in columns)]
            return tuple(x if needed else None for x, needed in zip(of_all, ctx.needs_grad, strict=True))


@dataclass(frozen=True)
class _Factors:
    """Inputs of chunks, and the factors of the formulas that do not depend on the state.

    Attributes:
        q: [M, N, C, H].
        k: [M, N, C, H].
        v: [M, N, C, E].
        since_start: e^c, the decay since the start of the chunk, [M, N, C, 1].
        until_end: e^(c_C - c), the decay until the end of the chunk, [M, N, C, 1].
        d: D [M, N, C, C].
        p: P.
        delta: further factors of the gated delta rule.
    """

    q: paddle.Tensor
    k: paddle.Tensor
    v: paddle.Tensor
    since_start: paddle.Tensor
    until_end: paddle.Tensor
    d: paddle.Tensor
    p: paddle.Tensor
    delta: _DeltaFactors | None

    @classmethod
    def of_chunks(cls, inputs: Sequence[paddle.Tensor], chunks: DocumentChunks) -> _Factors:
        """Return the factors of all chunks, from the inputs of `chunked_recurrence`."""
        q_MNCH, k_MNCH, v_MNCE, decay_MNC, *beta = (to_chunks(x, chunks) for x in inputs)
        sums_MNC = decay_MNC.astype("float64").cumsum(-1)
        difference_MNCC = paddle.tril(sums_MNC.unsqueeze(-1) - sums_MNC.unsqueeze(-2))
        d_MNCC = paddle.tril(paddle.exp(difference_MNCC.astype(decay_MNC.dtype)))
        until_end_MNC = paddle.exp((sums_MNC[..., -1:] - sums_MNC).astype(decay_MNC.dtype))
        return cls(
            q_MNCH,
            k_MNCH,
            v_MNCE,
            since_start=paddle.exp(sums_MNC.astype(decay_MNC.dtype)).unsqueeze(-1),
            until_end=until_end_MNC.unsqueeze(-1),
            d=d_MNCC,
            p=d_MNCC * (q_MNCH @ _t(k_MNCH)),
            delta=_DeltaFactors.of_chunks(k_MNCH, d_MNCC, *beta) if beta else None,
        )

    def of_level(self, level: Level) -> _Factors:
        """Return the factors of the chunks of a level."""
        tensors = {field.name: getattr(self, field.name)[level.chunks] for field in fields(self)[:-1]}
        delta = self.delta
        if delta is not None:
            delta = _DeltaFactors(*(getattr(delta, field.name)[level.chunks] for field in fields(delta)))
        return _Factors(**tensors, delta=delta)

    def outputs(self, before_MNHE: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return the outputs, and the states after the chunks, for the states before the chunks."""
        u_MNCE = self._added_rows(before_MNHE)
        o_MNCE = self.since_start * (self.q @ before_MNHE) + self.p @ u_MNCE
        return o_MNCE, self._whole_decay * before_MNHE + _t(self.until_end * self.k) @ u_MNCE

    @property
    def _whole_decay(self) -> paddle.Tensor:
        """e^(c_C), [M, N, 1, 1]."""
        return self.since_start[:, :, -1:]

    def _read_rows(self, before_MNHE: paddle.Tensor) -> paddle.Tensor:
        """Return e^c K S0, the rows that the keys read from the decayed state."""
        return self.since_start * (self.k @ before_MNHE)

    def _added_rows(self, before_MNHE: paddle.Tensor) -> paddle.Tensor:
        """Return U, the rows that the chunks add to the states."""
        if self.delta is None:
            return self.v
        return self.delta.t @ (self.delta.beta * (self.v - self._read_rows(before_MNHE)))

    def gradients(
        self, before_MNHE: paddle.Tensor, of_o_MNCE: paddle.Tensor, of_after_MNHE: paddle.Tensor
    ) -> tuple[tuple[paddle.Tensor, ...], paddle.Tensor]:
        """Return the gradients of the inputs of `chunked_recurrence`, and of the states before the chunks.

        With M = dP o P, plus dA o A in the gated delta rule, the gradient of the decay at position i is the sum of M_tj
        over t >= i and j < i, plus the gradients of the factors e^c and e^(c_C - c) that contain the decay. This form
        avoids cancellation.
        """
        u_MNCE = self._added_rows(before_MNHE)
        of_p_MNCC = paddle.tril(of_o_MNCE @ _t(u_MNCE))
        of_qk_MNCC, m_MNCC = of_p_MNCC * self.d, of_p_MNCC * self.p
        of_v_MNCE = of_u_MNCE = _t(self.p) @ of_o_MNCE + self.until_end * (self.k @ of_after_MNHE)
        by_end_MNCH = self.until_end * (u_MNCE @ _t(of_after_MNHE))
        by_start_MNCH = self.since_start * (of_o_MNCE @ _t(before_MNHE))
        of_q_MNCH = by_start_MNCH + of_qk_MNCC @ self.k
        of_k_MNCH = by_end_MNCH + _t(of_qk_MNCC) @ self.q
        by_start_MNC1 = (self.q * by_start_MNCH).sum(-1, keepdim=True)
        of_before_MNHE = self._whole_decay * of_after_MNHE + _t(self.since_start * self.q) @ of_o_MNCE
        of_beta = ()
        if self.delta is not None:
            z_MNCE = _t(self.delta.t) @ of_u_MNCE
            of_v_MNCE = self.delta.beta * z_MNCE
            of_a_MNCC = -paddle.tril(z_MNCE @ _t(u_MNCE), -1)
            of_kk_MNCC = self.delta.beta * of_a_MNCC * self.d
            by_start_MNCH = -self.since_start * (of_v_MNCE @ _t(before_MNHE))
            of_k_MNCH += by_start_MNCH + (of_kk_MNCC + _t(of_kk_MNCC)) @ self.k
            by_start_MNC1 += (self.k * by_start_MNCH).sum(-1, keepdim=True)
            m_MNCC += self.delta.beta * of_a_MNCC * self.delta.dkk
            of_before_MNHE -= _t(self.since_start * self.k) @ of_v_MNCE
            read_MNCE = self._read_rows(before_MNHE)
            of_beta = ((z_MNCE * (self.v - read_MNCE)).sum(-1) + (of_a_MNCC * self.delta.dkk).sum(-1),)
        by_end_MNC1 = (self.k * by_end_MNCH).sum(-1, keepdim=True)
        by_whole_MN11 = self._whole_decay * (before_MNHE * of_after_MNHE).sum([-2, -1], keepdim=True)
        not_before_CC = paddle.tril(paddle.ones(m_MNCC.shape[-2:], m_MNCC.dtype))
        of_decay_MNC1 = (
            paddle.tril(_t(not_before_CC) @ m_MNCC, -1).sum(-1, keepdim=True)
            + _t(not_before_CC) @ by_start_MNC1
            + paddle.tril(not_before_CC, -1) @ by_end_MNC1
            + by_whole_MN11
        )
        return (of_q_MNCH, of_k_MNCH, of_v_MNCE, of_decay_MNC1.squeeze(-1), *of_beta), of_before_MNHE


@dataclass(frozen=True)
class _DeltaFactors:
    """Factors of chunks that only the gated delta rule has.

    Attributes:
        beta: [M, N, C, 1].
        dkk: strictly lower part of D o (K K^T), [M, N, C, C]; A is beta times this matrix.
        t: T.
    """

    beta: paddle.Tensor
    dkk: paddle.Tensor
    t: paddle.Tensor

    @classmethod
    def of_chunks(cls, k_MNCH: paddle.Tensor, d_MNCC: paddle.Tensor, beta_MNC: paddle.Tensor) -> _DeltaFactors:
        """Return the factors of all chunks."""
        beta_MNC1 = beta_MNC.unsqueeze(-1)
        dkk_MNCC = paddle.tril(d_MNCC * (k_MNCH @ _t(k_MNCH)), -1)
        ones_MNCC = paddle.ones_like(d_MNCC)
        unit_MNCC = paddle.tril(ones_MNCC) - paddle.tril(ones_MNCC, -1)
        solve = paddle.linalg.triangular_solve
        return cls(beta_MNC1, dkk_MNCC, solve(beta_MNC1 * dkk_MNCC, unit_MNCC, upper=False, unitriangular=True))


def _t(x: paddle.Tensor) -> paddle.Tensor:
    """Return the matrices transposed."""
    return x.transpose([*range(x.ndim - 2), x.ndim - 1, x.ndim - 2])


def _sum_of_rows(parts: list[tuple[np.ndarray, paddle.Tensor]], count: int) -> paddle.Tensor:
    """Return `count` rows; row i is the sum of the rows of `parts` with index i."""
    indices, rows = zip(*parts, strict=True)
    updates = paddle.concat(list(rows))
    index = paddle.to_tensor(np.concatenate(indices)[:, None])
    return paddle.scatter_nd(index, updates, [count, *updates.shape[1:]])


def to_chunks(x_TN: paddle.Tensor, chunks: DocumentChunks) -> paddle.Tensor:
    """Return the positions [T, N, ...] in chunks [M, N, C, ...], with zeros in empty slots."""
    padded = paddle.concat([x_TN, paddle.zeros([1, *x_TN.shape[1:]], x_TN.dtype)])
    x_MCN = gather_rows(padded, chunks.positions.reshape([-1]))
    x_MCN = x_MCN.reshape([*axis_sizes(chunks.positions), *x_TN.shape[1:]])
    return x_MCN.transpose([0, 2, 1, *range(3, x_MCN.ndim)])


def to_positions(x_MNC: paddle.Tensor, chunks: DocumentChunks) -> paddle.Tensor:
    """Return the chunks [M, N, C, ...] as positions [T, N, ...]."""
    return gather_rows(x_MNC.transpose([0, 2, 1, *range(3, x_MNC.ndim)]).flatten(0, 1), chunks.slots)
