"""Grouped-query attention that normalizes values with RMS norms without a trained scale (Gemma 4).

    v = norm(v_proj(x)), or norm(k_proj(x)) in a layer without v_proj

Shapes: B batch, S sequence, K key-value heads, H head dimension, E all channels of a projection.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from paddlenlp_ext.nn.attention import Attention, AttentionInputs, AttentionShape
from paddlenlp_ext.ops.rms_norm import rms_norm


class NormedValueAttention(Attention):
    """Grouped-query attention with an RMS norm of each value head.

    Without `v_proj`, keys and values are computed from the same projection: keys by the key norm and RoPE, values by
    the value norm.
    """

    def __init__(self, shape: AttentionShape, layer_index: int) -> None:
        super().__init__(shape, layer_index)
        self.value_epsilon = shape.norm_epsilon
        if not shape.has_v_proj:
            self.input_names = ("q_proj", "k_proj")

    def attend(self, projected: Sequence[paddle.Tensor], inputs: AttentionInputs) -> paddle.Tensor:
        """Attend with the outputs of the layers in `input_names`; return the input of `o_proj`, [B, S, E]."""
        return super().attend([*projected, projected[1]] if len(projected) == 2 else projected, inputs)

    def _values(self, v_BSE: paddle.Tensor) -> paddle.Tensor:
        v_BSKH = self._heads(v_BSE)
        return rms_norm(v_BSKH, paddle.ones([self.head_dim], v_BSKH.dtype), self.value_epsilon)
