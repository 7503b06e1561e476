"""State space duality with Triton kernels (ops/gated_delta_rule/triton_recurrence.py).

Shapes: T positions, R documents, G groups, N heads, H state dimension, E head dimension.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.gated_delta_rule.kernels import LARGEST_KEY
from paddlenlp_ext.ops.gated_delta_rule.triton_recurrence import triton_recurrence
from paddlenlp_ext.ops.state_space_duality.reference import state_space_duality_reference


def state_space_duality_triton(
    c_TGH: paddle.Tensor,
    b_TGH: paddle.Tensor,
    dx_TNE: paddle.Tensor,
    decay_TN: paddle.Tensor,
    layout: AttentionLayout,
    initial_RNHE: paddle.Tensor | None = None,
    overwrites: bool = False,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Compute `state_space_duality`; the reference computes keys above `LARGEST_KEY`, and no states are overwritten."""
    inputs = (c_TGH, b_TGH, dx_TNE, decay_TN)
    if c_TGH.shape[2] > LARGEST_KEY:
        return state_space_duality_reference(*inputs, layout, initial_RNHE)
    return triton_recurrence(inputs, layout, initial_RNHE)
