"""Gated delta rule in plain Paddle, chunk by chunk, on any device, with a hand-written backward pass.

With c_i the sum of the decays of a chunk up to position i and S0 the state before the chunk (WY form of
arXiv:2406.06484 with the decays of arXiv:2412.06464):

    D_ij = e^(c_i - c_j) for i >= j, else 0
    A = strictly lower part of beta_i D_ij (k_i k_j)      T = (I + A)^-1      P = D o (Q K^T)
    U = T beta (V - e^c K S0)                             rows that the chunk adds to the state
    O = e^c Q S0 + P U
    S1 = e^(c_C) S0 + (e^(c_C - c) K)^T U                 state after the chunk

The backward pass recomputes everything but the states between chunks. An exponent is never positive, and c is summed in
float64, because the difference of two long sums loses precision. All else is computed in the dtype of the decays.

Shapes: T positions, R documents, G key heads, N value heads, H key dimension, E value dimension, M chunks, L chunks of
a level, C positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.gated_delta_rule.document_chunks import DocumentChunks, Level, document_chunks

NORM_EPSILON = 1e-6
"""Term that is added to the sum of squares when a query or a key is normalized."""


def gated_delta_rule_reference(
    q_TGH: paddle.Tensor,
    k_TGH: paddle.Tensor,
    v_TNE: paddle.Tensor,
    decay_TN: paddle.Tensor,
    beta_TN: paddle.Tensor,
    layout: AttentionLayout,
    initial_RNHE: paddle.Tensor | None = None,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Compute `gated_delta_rule` in chunks."""
    heads, head_dim, dtype = v_TNE.shape[1], k_TGH.shape[2], decay_TN.dtype
    if initial_RNHE is None:
        count = len(layout.documents()[0])
        initial_RNHE = paddle.zeros([count, heads, head_dim, v_TNE.shape[2]], dtype)
    with paddle.amp.auto_cast(enable=False):
        q_TNH, k_TNH = (_normalized(x_TGH.astype(dtype), heads) for x_TGH in (q_TGH, k_TGH))
        inputs = (q_TNH * head_dim**-0.5, k_TNH, v_TNE.astype(dtype), decay_TN, beta_TN.astype(dtype), initial_RNHE)
        o_TNE, final_RNHE = _ChunkedDeltaRule.apply(*inputs, document_chunks(layout))
    return o_TNE.astype(v_TNE.dtype), final_RNHE


def _normalized(x_TGH: paddle.Tensor, heads: int) -> paddle.Tensor:
    """Return the vectors with norm 1, repeated for the value heads that share a key head."""
    squares_TG1 = (x_TGH * x_TGH).sum(-1, keepdim=True)
    # in float64, because Paddle's square roots of float32 depend on the index in the tensor
    norm_TG1 = paddle.sqrt(squares_TG1.astype("float64") + NORM_EPSILON).astype(x_TGH.dtype)
    unit_TGH = x_TGH / norm_TG1
    return unit_TGH.repeat_interleave(heads // x_TGH.shape[1], axis=1)


class _ChunkedDeltaRule(PyLayer):
    @staticmethod
    def forward(ctx, q_TNH, k_TNH, v_TNE, decay_TN, beta_TN, initial_RNHE, chunks):
        inputs = q_TNH, k_TNH, v_TNE, decay_TN, beta_TN
        factors = _Factors.of_chunks(inputs, chunks)
        outputs, states, finals = [], [], []
        after_LNHE = initial_RNHE
        for level in chunks.levels:
            before_LNHE = _rows(after_LNHE, level.previous)
            o_LNCE, after_LNHE = factors.of_level(level).outputs(before_LNHE)
            outputs.append(o_LNCE)
            states.append(before_LNHE)
            finals.append(_rows(after_LNHE, level.ending))
        ctx.chunks, ctx.needs_grad = chunks, [not x.stop_gradient for x in (*inputs, initial_RNHE)]
        ctx.save_for_backward(*inputs, *states)
        order = np.argsort(np.concatenate([level.ended for level in chunks.levels]))
        return _to_positions(paddle.concat(outputs), chunks), _rows(paddle.concat(finals), order)

    @staticmethod
    def backward(ctx, o_gradient_TNE, final_gradient_RNHE):
        saved, chunks = ctx.saved_tensor(), ctx.chunks
        inputs, states = saved[:5], saved[5:]
        with paddle.amp.auto_cast(enable=False):
            factors, o_gradient_MNCE = _Factors.of_chunks(inputs, chunks), _to_chunks(o_gradient_TNE, chunks)
            gradients: list[tuple[paddle.Tensor, ...]] = []
            continued: list[tuple[np.ndarray, paddle.Tensor]] = []  # rows of the next level's gradient
            for level, before_LNHE in zip(reversed(chunks.levels), reversed(states), strict=True):
                ended = level.ending, _rows(final_gradient_RNHE, level.ended)
                after_gradient_LNHE = _sum_of_rows([ended, *continued], len(level.previous))
                of_level, before_gradient_LNHE = factors.of_level(level).gradients(
                    before_LNHE, o_gradient_MNCE[level.chunks], after_gradient_LNHE
                )
                gradients.append(of_level)
                continued = [(level.previous, before_gradient_LNHE)]
            columns = zip(*reversed(gradients), strict=True)
            of_inputs = [_to_positions(paddle.concat(column), chunks) for column in columns]
            of_inputs.append(_sum_of_rows(continued, len(final_gradient_RNHE)))
            return tuple(x if needed else None for x, needed in zip(of_inputs, ctx.needs_grad, strict=True))


@dataclass(frozen=True)
class _Factors:
    """Inputs of chunks, and the factors of the formulas that do not depend on the state.

    Attributes:
        q: [M, N, C, H].
        k: [M, N, C, H].
        v: [M, N, C, E].
        beta: [M, N, C, 1].
        since_start: e^c, the decay since the start of the chunk, [M, N, C, 1].
        until_end: e^(c_C - c), the decay until the end of the chunk, [M, N, C, 1].
        d: D [M, N, C, C].
        dkk: strictly lower part of D o (K K^T); A is beta times this matrix.
        t: T.
        p: P.
    """

    q: paddle.Tensor
    k: paddle.Tensor
    v: paddle.Tensor
    beta: paddle.Tensor
    since_start: paddle.Tensor
    until_end: paddle.Tensor
    d: paddle.Tensor
    dkk: paddle.Tensor
    t: paddle.Tensor
    p: paddle.Tensor

    @classmethod
    def of_chunks(cls, inputs: Sequence[paddle.Tensor], chunks: DocumentChunks) -> _Factors:
        """Return the factors of all chunks, from q, k, v, decays and beta of all positions."""
        q_MNCH, k_MNCH, v_MNCE, decay_MNC, beta_MNC = (_to_chunks(x, chunks) for x in inputs)
        sums_MNC = decay_MNC.astype("float64").cumsum(-1)
        difference_MNCC = paddle.tril(sums_MNC.unsqueeze(-1) - sums_MNC.unsqueeze(-2))
        d_MNCC = paddle.tril(paddle.exp(difference_MNCC.astype(decay_MNC.dtype)))
        until_end_MNC = paddle.exp((sums_MNC[..., -1:] - sums_MNC).astype(decay_MNC.dtype))
        dkk_MNCC = paddle.tril(d_MNCC * paddle.matmul(k_MNCH, k_MNCH, transpose_y=True), -1)
        beta_MNC1 = beta_MNC.unsqueeze(-1)
        unit_MNCC = paddle.eye(d_MNCC.shape[-1], dtype=d_MNCC.dtype).expand(d_MNCC.shape)
        return cls(
            q_MNCH,
            k_MNCH,
            v_MNCE,
            beta_MNC1,
            since_start=paddle.exp(sums_MNC.astype(decay_MNC.dtype)).unsqueeze(-1),
            until_end=until_end_MNC.unsqueeze(-1),
            d=d_MNCC,
            dkk=dkk_MNCC,
            t=paddle.linalg.triangular_solve(beta_MNC1 * dkk_MNCC, unit_MNCC, upper=False, unitriangular=True),
            p=d_MNCC * paddle.matmul(q_MNCH, k_MNCH, transpose_y=True),
        )

    def of_level(self, level: Level) -> _Factors:
        """Return the factors of the chunks of a level."""
        return _Factors(*(getattr(self, field.name)[level.chunks] for field in fields(self)))

    def outputs(self, before_MNHE: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return the outputs, and the states after the chunks, for the states before the chunks."""
        u_MNCE = self._added_rows(before_MNHE)
        o_MNCE = self.since_start * (self.q @ before_MNHE) + self.p @ u_MNCE
        added_MNHE = paddle.matmul(self.until_end * self.k, u_MNCE, transpose_x=True)
        return o_MNCE, self._whole_decay * before_MNHE + added_MNHE

    @property
    def _whole_decay(self) -> paddle.Tensor:
        """e^(c_C), [M, N, 1, 1]."""
        return self.since_start[:, :, -1:]

    def _added_rows(self, before_MNHE: paddle.Tensor) -> paddle.Tensor:
        """Return U, the rows that the chunks add to the states."""
        read_MNCE = self.since_start * (self.k @ before_MNHE)
        return self.t @ (self.beta * (self.v - read_MNCE))

    def gradients(
        self, before_MNHE: paddle.Tensor, of_o_MNCE: paddle.Tensor, of_after_MNHE: paddle.Tensor
    ) -> tuple[tuple[paddle.Tensor, ...], paddle.Tensor]:
        """Return the gradients of q, k, v, decays and beta, and of the states before the chunks.

        With Z = T^T dU and M = dA o A + dP o P, the gradient of the decay at position i is the sum of M_tj over t >= i
        and j < i, plus the gradients of the factors e^c and e^(c_C - c) that contain the decay. Written like this, no
        terms cancel.
        """
        q_MNCH, k_MNCH, beta_MNC1, d_MNCC = self.q, self.k, self.beta, self.d
        since_start_MNC1, until_end_MNC1 = self.since_start, self.until_end
        u_MNCE = self._added_rows(before_MNHE)
        of_u_MNCE = _t(self.p) @ of_o_MNCE + until_end_MNC1 * (k_MNCH @ of_after_MNHE)
        z_MNCE = _t(self.t) @ of_u_MNCE
        of_v_MNCE = beta_MNC1 * z_MNCE
        of_a_MNCC = -paddle.tril(z_MNCE @ _t(u_MNCE), -1)
        of_p_MNCC = paddle.tril(of_o_MNCE @ _t(u_MNCE))

        # products with a state, in dQ, dK and the gradients of e^c and e^(c_C - c)
        q_by_start_MNCH = since_start_MNC1 * (of_o_MNCE @ _t(before_MNHE))
        k_by_start_MNCH = -since_start_MNC1 * (of_v_MNCE @ _t(before_MNHE))
        k_by_end_MNCH = until_end_MNC1 * (u_MNCE @ _t(of_after_MNHE))

        of_kk_MNCC, of_qk_MNCC = beta_MNC1 * of_a_MNCC * d_MNCC, of_p_MNCC * d_MNCC
        of_q_MNCH = q_by_start_MNCH + of_qk_MNCC @ k_MNCH
        of_k_MNCH = k_by_start_MNCH + k_by_end_MNCH + _t(of_qk_MNCC) @ q_MNCH
        of_k_MNCH = of_k_MNCH + (of_kk_MNCC + _t(of_kk_MNCC)) @ k_MNCH

        read_MNCE = since_start_MNC1 * (k_MNCH @ before_MNHE)
        of_beta_MNC = (z_MNCE * (self.v - read_MNCE)).sum(-1) + (of_a_MNCC * self.dkk).sum(-1)

        m_MNCC = beta_MNC1 * of_a_MNCC * self.dkk + of_p_MNCC * self.p
        not_before_CC = paddle.tril(paddle.ones(m_MNCC.shape[-2:], m_MNCC.dtype))
        by_start_MNC1 = (q_MNCH * q_by_start_MNCH + k_MNCH * k_by_start_MNCH).sum(-1, keepdim=True)
        by_end_MNC1 = (k_MNCH * k_by_end_MNCH).sum(-1, keepdim=True)
        by_whole_MN11 = self._whole_decay * (before_MNHE * of_after_MNHE).sum([-2, -1], keepdim=True)
        of_decay_MNC1 = (
            paddle.tril(_t(not_before_CC) @ m_MNCC, -1).sum(-1, keepdim=True)
            + _t(not_before_CC) @ by_start_MNC1
            + paddle.tril(not_before_CC, -1) @ by_end_MNC1
            + by_whole_MN11
        )
        of_before_MNHE = (
            self._whole_decay * of_after_MNHE
            + _t(since_start_MNC1 * q_MNCH) @ of_o_MNCE
            - _t(since_start_MNC1 * k_MNCH) @ of_v_MNCE
        )
        return (of_q_MNCH, of_k_MNCH, of_v_MNCE, of_decay_MNC1.squeeze(-1), of_beta_MNC), of_before_MNHE


def _t(x: paddle.Tensor) -> paddle.Tensor:
    """Return the matrices transposed."""
    return x.transpose([*range(x.ndim - 2), x.ndim - 1, x.ndim - 2])


def _rows(x: paddle.Tensor, indices: np.ndarray) -> paddle.Tensor:
    return paddle.gather(x, paddle.to_tensor(indices))


def _sum_of_rows(parts: list[tuple[np.ndarray, paddle.Tensor]], count: int) -> paddle.Tensor:
    """Return `count` rows, each the sum of the rows of `parts` with its index."""
    indices, rows = zip(*parts, strict=True)
    updates = paddle.concat(list(rows))
    index = paddle.to_tensor(np.concatenate(indices)[:, None])
    return paddle.scatter_nd(index, updates, [count, *updates.shape[1:]])


def _to_chunks(x_TN: paddle.Tensor, chunks: DocumentChunks) -> paddle.Tensor:
    """Return the positions [T, N, ...] in chunks [M, N, C, ...], with zeros in empty slots."""
    padded = paddle.concat([x_TN, paddle.zeros([1, *x_TN.shape[1:]], x_TN.dtype)])
    x_MCN = _rows(padded, chunks.positions.reshape(-1)).reshape([*chunks.positions.shape, *x_TN.shape[1:]])
    return x_MCN.transpose([0, 2, 1, *range(3, x_MCN.ndim)])


def _to_positions(x_MNC: paddle.Tensor, chunks: DocumentChunks) -> paddle.Tensor:
    """Return the chunks [M, N, C, ...] as positions [T, N, ...]."""
    return _rows(x_MNC.transpose([0, 2, 1, *range(3, x_MNC.ndim)]).flatten(0, 1), chunks.slots)
