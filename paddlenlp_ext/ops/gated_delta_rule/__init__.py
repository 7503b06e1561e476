"""Gated delta rule, the recurrence of Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464).

A head has a matrix S [H, E] as its state, zero or an initial state before the first position of a document. At each
position, with decay g <= 0, strength beta, query q and key k of norm 1, and value v:

    S <- e^g S
    S <- S + k (beta (v - S^T k))^T      moves S^T k, the value stored for k, towards v
    o = S^T q / sqrt(H)

Shapes: T positions, R documents, G key heads, N value heads, H key dimension, E value dimension.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.cpp.library import usable_in_fp32_or_bf16
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.gated_delta_rule.cpp import gated_delta_rule_cpp
from paddlenlp_ext.ops.gated_delta_rule.reference import gated_delta_rule_reference
from paddlenlp_ext.ops.gated_delta_rule.triton import gated_delta_rule_triton
from paddlenlp_ext.ops.triton_utils.launch import floats_on_gpu_with_triton

gated_delta_rule_op = DispatchedOp(
    "gated delta rule",
    cpp=(gated_delta_rule_cpp, usable_in_fp32_or_bf16),
    triton=(gated_delta_rule_triton, floats_on_gpu_with_triton),
    reference=gated_delta_rule_reference,
)


def gated_delta_rule(
    q_TGH: paddle.Tensor,
    k_TGH: paddle.Tensor,
    v_TNE: paddle.Tensor,
    decay_TN: paddle.Tensor,
    beta_TN: paddle.Tensor,
    layout: AttentionLayout,
    initial_RNHE: paddle.Tensor | None = None,
    overwrites: bool = False,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the outputs [T, N, E] in the dtype of `v_TNE`, and the states after the documents [R, N, H, E].

    A document with a parent starts from the state after the parent. The op is differentiable with respect to all
    tensors.

    Args:
        q_TGH: queries of the documents of `layout`, one after another; the op normalizes queries and keys.
        k_TGH: keys; key head j serves the value heads j N / G to (j + 1) N / G - 1.
        v_TNE: values.
        decay_TN: logarithms of the decays, at most 0, float32.
        beta_TN: strengths, float32.
        layout: documents of the batch.
        initial_RNHE: states before the documents, float32; None for zeros. The op ignores the states of documents
            with a parent.
        overwrites: whether a pass without gradients may overwrite `initial_RNHE` with the states after the documents.
    """
    run = gated_delta_rule_op.choose(v_TNE)
    return run(q_TGH, k_TGH, v_TNE, decay_TN, beta_TN, layout, initial_RNHE, overwrites)
