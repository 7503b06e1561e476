"""Kimi delta rule in C++ (csrc/delta_rule_forward.cpp, csrc/kimi_delta_rule_backward.cpp).

Shapes: T positions, R documents, N heads, H key dimension, E value dimension.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.gated_delta_rule.cpp_recurrence import CppRecurrence
from paddlenlp_ext.ops.gated_delta_rule.reference import NORM_EPSILON

_DELTA_RULE = CppRecurrence(
    "kimi_delta_rule",
    "DeltaRuleSizes",
    "DeltaRuleTensors",
    inputs=("q", "k", "v", "decay", "beta", "initial"),
    output="o",
    constants=(NORM_EPSILON,),
    has_channel_decays=True,
)


def kimi_delta_rule_cpp(
    q_TNH: paddle.Tensor,
    k_TNH: paddle.Tensor,
    v_TNE: paddle.Tensor,
    decay_TNH: paddle.Tensor,
    beta_TN: paddle.Tensor,
    layout: AttentionLayout,
    initial_RNHE: paddle.Tensor | None = None,
    overwrites: bool = False,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Compute `kimi_delta_rule` in C++."""
    return _DELTA_RULE((q_TNH, k_TNH, v_TNE, decay_TNH, beta_TN), layout, initial_RNHE, overwrites)
