"""Gated delta rule with Triton kernels (triton_recurrence.py).

Shapes: T positions, R documents, G key heads, N value heads, H key dimension, E value dimension.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.gated_delta_rule.kernels import LARGEST_KEY
from paddlenlp_ext.ops.gated_delta_rule.reference import gated_delta_rule_reference
from paddlenlp_ext.ops.gated_delta_rule.triton_recurrence import triton_recurrence


def gated_delta_rule_triton(
    q_TGH: paddle.Tensor,
    k_TGH: paddle.Tensor,
    v_TNE: paddle.Tensor,
    decay_TN: paddle.Tensor,
    beta_TN: paddle.Tensor,
    layout: AttentionLayout,
    initial_RNHE: paddle.Tensor | None = None,
    overwrites: bool = False,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Compute `gated_delta_rule`; the reference computes keys above `LARGEST_KEY`, and no states are overwritten."""
    inputs = (q_TGH, k_TGH, v_TNE, decay_TN, beta_TN)
    if q_TGH.shape[2] > LARGEST_KEY:
        return gated_delta_rule_reference(*inputs, layout, initial_RNHE)
    return triton_recurrence(inputs, layout, initial_RNHE)
