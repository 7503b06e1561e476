"""State space duality in plain Paddle, on any device.

Shapes: T positions, R documents, G groups, N heads, H state dimension, E head dimension.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.gated_delta_rule.chunked_recurrence import chunked_recurrence


def state_space_duality_reference(
    c_TGH: paddle.Tensor,
    b_TGH: paddle.Tensor,
    dx_TNE: paddle.Tensor,
    decay_TN: paddle.Tensor,
    layout: AttentionLayout,
    initial_RNHE: paddle.Tensor | None = None,
    overwrites: bool = False,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Compute `state_space_duality` in chunks, in the dtype of the decays; no states are overwritten."""
    dtype, repeats = decay_TN.dtype, dx_TNE.shape[1] // b_TGH.shape[1]
    with paddle.amp.auto_cast(enable=False):
        c_TNH, b_TNH = (x_TGH.astype(dtype).repeat_interleave(repeats, axis=1) for x_TGH in (c_TGH, b_TGH))
        y_TNE, final_RNHE = chunked_recurrence((c_TNH, b_TNH, dx_TNE.astype(dtype), decay_TN), layout, initial_RNHE)
    return y_TNE.astype(dx_TNE.dtype), final_RNHE
