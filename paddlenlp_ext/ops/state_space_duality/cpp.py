"""State space duality in C++ (csrc/state_space_duality_*.cpp).

Shapes: T positions, R documents, G groups, N heads, H state dimension, E head dimension.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.gated_delta_rule.cpp_recurrence import CppRecurrence

_STATE_SPACE = CppRecurrence(
    "state_space_duality",
    "StateSpaceSizes",
    "StateSpaceTensors",
    inputs=("c", "b", "dx", "decay", "initial"),
    output="y",
)


def state_space_duality_cpp(
    c_TGH: paddle.Tensor,
    b_TGH: paddle.Tensor,
    dx_TNE: paddle.Tensor,
    decay_TN: paddle.Tensor,
    layout: AttentionLayout,
    initial_RNHE: paddle.Tensor | None = None,
    overwrites: bool = False,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Compute `state_space_duality` in C++."""
    return _STATE_SPACE((c_TGH, b_TGH, dx_TNE, decay_TN), layout, initial_RNHE, overwrites)
