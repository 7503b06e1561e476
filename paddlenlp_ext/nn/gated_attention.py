"""Grouped-query attention whose output is multiplied by a sigmoid gate (arXiv:2505.06708).

Shapes: B batch, S sequence, D hidden, N query heads, H head dimension, E all channels of the query heads.
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


class QueryGatedAttention(Attention):
    """Gated attention whose `q_proj` returns the query and then the gate of each head, as in Qwen3-Next and Qwen3.5."""

    def __init__(self, shape: AttentionShape, layer_index: int) -> None:
        super().__init__(shape, layer_index)
        self.q_proj = Linear(shape.hidden_size, 2 * shape.num_heads * shape.head_dim, shape.qkv_bias)

    def attend(self, projected: Sequence[paddle.Tensor], inputs: AttentionInputs) -> paddle.Tensor:
        """Attend with projected queries and gates, keys and values; return the gated result [B, S, E]."""
        q_and_gate, k_BSE, v_BSE = projected
        num_heads = q_and_gate.shape[-1] // (2 * self.head_dim)
        q_BSNH, gate_BSNH = paddle.chunk(q_and_gate.reshape([0, 0, num_heads, 2 * self.head_dim]), 2, axis=-1)
        attended_BSE = super().attend((q_BSNH.flatten(2), k_BSE, v_BSE), inputs)
        return attended_BSE * F.sigmoid(gate_BSNH.flatten(2))


GATED_ATTENTION: dict[str, type[Attention]] = {"gate_proj": GatedAttention, "q_proj": QueryGatedAttention}
"""Classes of attention layers, by the name of the linear layer that computes the gate."""
