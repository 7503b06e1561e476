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

Shapes: T positions, R documents, N heads, H key dimension, E value dimension, C positions of a chunk.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.cpp.library import usable_in_fp32_or_bf16
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.kimi_delta_rule.cpp import kimi_delta_rule_cpp
from paddlenlp_ext.ops.kimi_delta_rule.reference import kimi_delta_rule_reference

kimi_delta_rule_op = DispatchedOp(
    "Kimi delta rule", cpp=(kimi_delta_rule_cpp, usable_in_fp32_or_bf16), reference=kimi_delta_rule_reference
)


def kimi_delta_rule(
    q_TNH: paddle.Tensor,
    k_TNH: paddle.Tensor,
    v_TNE: paddle.Tensor,
    decay_TNH: paddle.Tensor,
    beta_TN: paddle.Tensor,
    layout: AttentionLayout,
    initial_RNHE: paddle.Tensor | None = None,
    overwrites: bool = False,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the outputs [T, N, E] in the dtype of `v_TNE`, and the states after the documents [R, N, H, E].

    A document with a parent starts from the state after the parent. The op is differentiable with respect to all
    tensors.

    Args:
        q_TNH: queries of the documents of `layout`, one after another; the op normalizes queries and keys.
        k_TNH: keys.
        v_TNE: values.
        decay_TNH: logarithms of the decays, at most 0, float32.
        beta_TN: beta, float32.
        layout: documents of the batch.
        initial_RNHE: states before the documents, float32; None for zeros. The op ignores the states of documents with
            a parent.
        overwrites: whether a pass without gradients may overwrite `initial_RNHE` with the states after the documents.
    """
    run = kimi_delta_rule_op.choose(v_TNE)
    return run(q_TNH, k_TNH, v_TNE, decay_TNH, beta_TN, layout, initial_RNHE, overwrites)
