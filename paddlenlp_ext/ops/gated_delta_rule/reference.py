"""Gated delta rule in plain Paddle, on any device.

Shapes: T positions, R documents, G key heads, N value heads, H key dimension, E value dimension.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.gated_delta_rule.chunked_recurrence import chunked_recurrence

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
    overwrites: bool = False,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Compute `gated_delta_rule` in chunks, in the dtype of the decays; no states are overwritten."""
    dtype = decay_TN.dtype
    with paddle.amp.auto_cast(enable=False):
        q_TNH, k_TNH = (normalized(x_TGH.astype(dtype), v_TNE.shape[1]) for x_TGH in (q_TGH, k_TGH))
        inputs = q_TNH * q_TNH.shape[2] ** -0.5, k_TNH, v_TNE.astype(dtype), decay_TN, beta_TN.astype(dtype)
        o_TNE, final_RNHE = chunked_recurrence(inputs, layout, initial_RNHE)
    return o_TNE.astype(v_TNE.dtype), final_RNHE


def normalized(x_TGH: paddle.Tensor, heads: int) -> paddle.Tensor:
    """Return the vectors scaled to norm 1, and repeated for the value heads that share a key head."""
    squares_TG1 = (x_TGH * x_TGH).sum(-1, keepdim=True)
    # in float64, because Paddle's square roots of float32 depend on the index in the tensor
    norm_TG1 = paddle.sqrt(squares_TG1.astype("float64") + NORM_EPSILON).astype(x_TGH.dtype)
    unit_TGH = x_TGH / norm_TG1
    return unit_TGH.repeat_interleave(heads // x_TGH.shape[1], axis=1)
