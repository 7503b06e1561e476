"""Grouped-query attention over the keys and values of an earlier layer (Gemma 4 E2B and E4B).

The layer projects only queries. The key-value cache stores the keys and values once, for the earlier layer.

Shapes: B batch, S sequence, N query heads, H head dimension, E all channels of a projection, D hidden.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.nn.attention import AttentionInputs, AttentionLayer, AttentionShape
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.recompute import recompute_region
from paddlenlp_ext.nn.rms_norm import RMSNorm


class SharedKeyAttention(AttentionLayer):
    """Grouped-query attention that reads the keys and values of layer `source`.

    Attributes:
        source: index of the layer that computes the keys and values. The layer has the same window and the same RoPE.
    """

    input_names = ("q_proj",)

    def __init__(self, shape: AttentionShape, layer_index: int) -> None:
        super().__init__(shape, layer_index)
        assert shape.source is not None and shape.source < layer_index, "keys and values must be of an earlier layer"
        self.source = shape.source
        size = shape.num_heads * shape.head_dim
        self.q_proj = Linear(shape.hidden_size, size, shape.qkv_bias)
        self.o_proj = Linear(size, shape.hidden_size, shape.output_bias)
        if self.qk_norm is not None:
            assert self.qk_norm.per_head and not self.qk_norm.after_rotation, "query norms must precede RoPE, per head"
            setattr(self, self.qk_norm.names[0], RMSNorm(shape.head_dim, shape.norm_epsilon, shape.norm_offset))

    def forward(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Attend to the visible positions; map [B, S, D] to [B, S, D]."""
        assert inputs.layer is not None and inputs.layer.shared is not None, "the source layer must run first"
        q_BSNH = self._queries(recompute_region("attention_column_ln", self.q_proj, x_BSD), inputs)
        tensors = q_BSNH, *inputs.layer.shared
        if inputs.cache is None:
            out_BSNH = recompute_region("flash_attn", self._attention_over(inputs), *tensors)
        else:
            options = self.window, self.scale, self.implementation, self.score_options
            out_BSNH = inputs.cache.attend(self.source, *tensors, *options, is_stored=True)
        return recompute_region("attention_row_ln", self.o_proj, out_BSNH.flatten(2))

    def _queries(self, q_BSE: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        q_BSNH = q_BSE.reshape([0, 0, q_BSE.shape[-1] // self.head_dim, self.head_dim])
        if self.qk_norm is not None:
            q_BSNH = getattr(self, self.qk_norm.names[0])(q_BSNH)
        q_BSNH = self.rotate(q_BSNH, *inputs.rotations[self.layer_index])
        return q_BSNH if inputs.query_scale is None else q_BSNH * inputs.query_scale.astype(q_BSNH.dtype)
