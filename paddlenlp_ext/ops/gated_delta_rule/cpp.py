"""Gated delta rule in C++ (csrc/delta_rule_forward.cpp, csrc/gated_delta_rule_backward.cpp).

Shapes: T positions, R documents, G key heads, N value heads, H key dimension, E value dimension.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.gated_delta_rule.cpp_recurrence import CppRecurrence
from paddlenlp_ext.ops.gated_delta_rule.reference import NORM_EPSILON

DELTA_RULE = CppRecurrence(
    "gated_delta_rule",
    "DeltaRuleSizes",
    "DeltaRuleTensors",
    inputs=("q", "k", "v", "decay", "beta", "initial"),
    output="o",
    constants=(NORM_EPSILON,),
)


def gated_delta_rule_cpp(
    q_TGH: paddle.Tensor,
    k_TGH: paddle.Tensor,
    v_TNE: paddle.Tensor,
    decay_TN: paddle.Tensor,
    beta_TN: paddle.Tensor,
    layout: AttentionLayout,
    initial_RNHE: paddle.Tensor | None = None,
    overwrites: bool = False,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Compute `gated_delta_rule` in C++."""
    return DELTA_RULE((q_TGH, k_TGH, v_TNE, decay_TN, beta_TN), layout, initial_RNHE, overwrites)
