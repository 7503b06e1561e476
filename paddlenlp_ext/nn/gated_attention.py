"""Grouped-query attention whose output is multiplied by a sigmoid gate (arXiv:2505.06708).

Shapes: B batch, S sequence, D hidden, E all channels of the query heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
import paddle.nn.functional as F

from paddlenlp_ext.nn.attention import Attention, AttentionInputs, AttentionShape
from paddlenlp_ext.nn.linear import Linear


class GatedAttention(Attention):
    """Grouped-query attention with a gate per output channel: `o_proj(attention(x) * sigmoid(gate_proj(x)))`."""

    input_names = (*Attention.input_names, "gate_proj")

    def __init__(self, shape: AttentionShape, layer_index: int) -> None:
        super().__init__(shape, layer_index)
        self.gate_proj = Linear(shape.hidden_size, shape.num_heads * shape.head_dim)

    def attend(self, projected: Sequence[paddle.Tensor], inputs: AttentionInputs) -> paddle.Tensor:
        """Attend with projected queries, keys, values and gates; return the gated result [B, S, E]."""
        *projected, gate_BSE = projected
        return super().attend(projected, inputs) * F.sigmoid(gate_BSE)
