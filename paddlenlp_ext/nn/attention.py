"""Causal self-attention with grouped key-value heads: projections, optional QK norms, RoPE, attention op.

Documents packed into one row do not attend to each other. Positions restart at 0 in every document. With
`document_lengths` [[3, 2]], x marks the keys that a query attends to:

    document        a a a b b
    position_ids    0 1 2 0 1

    query a 0       x
          a 1       x x
          a 2       x x x
          b 0             x
          b 1             x x

A trained prefix precedes every document: each query also attends to all P positions of the prefix.

Shapes: B batch, S sequence, P positions of a prefix, N query heads, K key-value heads, H head dimension, E head
dimension of values (usually H), R rotated channels of a head, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.nn.layer_tensors import LayerTensors
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.recompute import recompute_region
from paddlenlp_ext.nn.rms_norm import RMSNorm
from paddlenlp_ext.nn.rotary_embedding import Rotation
from paddlenlp_ext.nn.token_mixer import TokenMixer
from paddlenlp_ext.ops.attention import AttentionLayout, KeyValuePrefix, ScoreOptions, alibi_slopes, attention
from paddlenlp_ext.ops.attention.key_value_cache import KeyValueCache
from paddlenlp_ext.ops.cpp.bf16 import activation_dtype
from paddlenlp_ext.ops.rope import apply_rope, rotate_heads
from paddlenlp_ext.ops.rope.reference import HeadNorms
from paddlenlp_ext.paddle_compat import has_forward_hooks


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs that all layers of one forward pass share.

    Attributes:
        rotations: RoPE cosines and sines of each layer.
        layouts: document layout for each window size (key None: no window). Empty with a cache.
        cache: keys and values of earlier positions; None: no cache.
        prefix: trained keys and values of the current layer, which precede every document. Unused with a cache, because
            the cache stores the prefix.
        num_shared: number of positions of a prompt at the start of the row, which all documents of the row attend to;
            0: no prompt. With a prompt, the batch size is 1, and `layouts` describes only the positions after the
            prompt.
        adapter_inputs: inputs that only adapters read.
        loss_positions: positions whose final hidden states are used, as unique indices into the flattened batch
            [B * S], int64 [R]; None: all positions.
        query_scale: factor of the queries after RoPE, [B, S, 1, 1] (nn/query_scale.py); None: 1.
        input_ids: token ids [B, S], if the model has layer embeddings.
        layer: tensors that the current layer exchanges with other layers; None in models without such tensors.
    """

    rotations: Sequence[Rotation]
    layouts: Mapping[int | None, AttentionLayout]
    cache: KeyValueCache | None = None
    prefix: KeyValuePrefix | None = None
    num_shared: int = 0
    adapter_inputs: Any = None
    loss_positions: paddle.Tensor | None = None
    query_scale: paddle.Tensor | None = None
    input_ids: paddle.Tensor | None = None
    layer: LayerTensors | None = None


@dataclass(frozen=True)
class QKNorm:
    """RMS norms of queries and keys.

    Attributes:
        names: checkpoint names of the query norm and the key norm.
        per_head: True to normalize each head separately; False to normalize all heads of a projection together.
        after_rotation: True to apply the norms after RoPE; False to apply the norms before RoPE.
    """

    names: tuple[str, str] = ("q_norm", "k_norm")
    per_head: bool = True
    after_rotation: bool = False

    def __post_init__(self) -> None:
        assert self.per_head or not self.after_rotation, "norms after RoPE must be per head"


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes and options of an attention layer.

    Attributes:
        qk_norm: norms of queries and keys; None: no norms.
        norm_epsilon, norm_offset: options of the QK norms (nn/rms_norm.py).
        scale: factor of the attention scores; None: 1 / sqrt(head_dim).
        rotates: whether RoPE is applied to queries and keys.
        interleaved: whether RoPE rotates pairs of neighbouring channels (2i, 2i + 1), instead of pairs (i, i + R / 2).
        window: sliding window; None: no window.
        softcap: soft-cap of the attention scores (ops/soft_cap.py); None: no soft-cap.
        has_sinks: whether each head has a trained attention sink.
        has_linear_biases: whether ALiBi biases are added to the attention scores.
        has_v_proj: whether values have a projection; False: values are computed from the output of `k_proj`.
        source: index of an earlier layer, whose keys and values the layer reads; None: the layer computes its own.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_v_proj: bool = True
    source: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QKNorm | None = None
    norm_epsilon: float = 1e-6
    norm_offset: float = 0.0
    scale: float | None = None
    rotates: bool = True
    interleaved: bool = False
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    has_linear_biases: bool = False


class AttentionLayer(TokenMixer):
    """Base class of causal self-attention layers. Subclasses define the projections.

    Attributes:
        prefix_shape: shape of one position of a trained prefix. A cache stores values of the same shape per position.
        prefix_head_axis: axis of `prefix_shape` that tensor parallelism shards; None: no axis.
        softcap: soft-cap of the attention scores; None: no soft-cap.
        slopes_N: ALiBi slopes of the heads on this rank; None: no ALiBi.
        sinks: attention sinks of the heads on this rank, [N]; None: no sinks.
    """

    attribute = "self_attn"
    prefix_shape: tuple[int, ...]
    prefix_head_axis: int | None = None
    sinks: paddle.Tensor | None

    def __init__(self, shape: AttentionShape, layer_index: int) -> None:
        super().__init__(layer_index)
        self.head_dim, self.window = shape.head_dim, shape.window
        self.rotates, self.interleaved, self.qk_norm = shape.rotates, shape.interleaved, shape.qk_norm
        self.scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
        self.slopes_N = alibi_slopes(shape.num_heads) if shape.has_linear_biases else None
        self.softcap = shape.softcap
        dtype = activation_dtype(paddle.get_default_dtype())
        self.sinks = self.create_parameter([shape.num_heads], dtype=dtype, is_bias=True) if shape.has_sinks else None

    def forward(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Attend to the visible positions; map [B, S, D] to [B, S, D]."""
        raise NotImplementedError

    def split_prefix(self, prefix: paddle.Tensor) -> KeyValuePrefix:
        """Split a trained prefix [P, *prefix_shape] into the two tensors that a cache stores."""
        raise NotImplementedError

    def join_prefix(self, pair: KeyValuePrefix) -> paddle.Tensor:
        """Join the two tensors of `split_prefix` into a trained prefix [P, *prefix_shape]."""
        raise NotImplementedError

    @property
    def score_options(self) -> ScoreOptions:
        """Soft-cap, ALiBi slopes and sinks of the attention scores."""
        return ScoreOptions(self.softcap, self.slopes_N, self.sinks)

    def keep_heads(self, index: int, num_parts: int) -> None:
        """Keep only the ALiBi slopes of the heads in tensor-parallel shard `index` of `num_parts`."""
        if self.slopes_N is not None:
            self.slopes_N = np.split(self.slopes_N, num_parts)[index]

    def rotate(self, x_BSNH: paddle.Tensor, cos_BSR: paddle.Tensor, sin_BSR: paddle.Tensor) -> paddle.Tensor:
        """Apply RoPE to queries or keys [B, S, heads, H]; return them unchanged if the layer has no RoPE."""
        return apply_rope(x_BSNH, cos_BSR, sin_BSR, self.interleaved) if self.rotates else x_BSNH

    def _attention_over(self, inputs: AttentionInputs) -> Callable[..., paddle.Tensor]:
        layout, shared = inputs.layouts[self.window], inputs.num_shared
        return lambda q_BSNH, k_BSKH, v_BSKH, *prefix: self._attend(q_BSNH, k_BSKH, v_BSKH, prefix, layout, shared)

    def _attend(
        self,
        q_BSNH: paddle.Tensor,
        k_BSKH: paddle.Tensor,
        v_BSKH: paddle.Tensor,
        prefix_tensors: tuple[paddle.Tensor, ...],
        layout: AttentionLayout,
        shared: int,
    ) -> paddle.Tensor:
        """Run the attention op; all documents also attend to the first `shared` positions of the row."""
        prefix = None
        if prefix_tensors:
            prefix = (prefix_tensors[0].astype(k_BSKH.dtype), prefix_tensors[1].astype(v_BSKH.dtype))
        if not shared:
            return attention(
                q_BSNH, k_BSKH, v_BSKH, layout, self.scale, self.implementation, prefix, self.score_options
            )
        assert prefix is None, "shared positions and a trained prefix must not be combined"
        q_1PNH, k_1PKH, v_1PKH = (x[:, :shared] for x in (q_BSNH, k_BSKH, v_BSKH))
        q_1SNH, k_1SKH, v_1SKH = (x[:, shared:] for x in (q_BSNH, k_BSKH, v_BSKH))
        shared_layout = AttentionLayout.from_documents([[shared]], self.window)
        options = (self.scale, self.implementation)
        shared_1PNH = attention(q_1PNH, k_1PKH, v_1PKH, shared_layout, *options, None, self.score_options)
        prefix = (k_1PKH[0], v_1PKH[0])
        rest_1SNH = attention(q_1SNH, k_1SKH, v_1SKH, layout, *options, prefix, self.score_options)
        return paddle.concat([shared_1PNH, rest_1SNH], axis=1)


class Attention(AttentionLayer):
    """Grouped-query attention: queries, keys and values are projections of the hidden states."""

    input_names = ("q_proj", "k_proj", "v_proj")
    prefix_head_axis = 1

    def __init__(self, shape: AttentionShape, layer_index: int) -> None:
        super().__init__(shape, layer_index)
        self.prefix_shape = (2, shape.num_kv_heads, shape.head_dim)
        kv_size = shape.num_kv_heads * shape.head_dim
        self.q_proj = Linear(shape.hidden_size, shape.num_heads * shape.head_dim, shape.qkv_bias)
        self.k_proj = Linear(shape.hidden_size, kv_size, shape.qkv_bias)
        if shape.has_v_proj:
            self.v_proj = Linear(shape.hidden_size, kv_size, shape.qkv_bias)
        self.o_proj = Linear(shape.num_heads * shape.head_dim, shape.hidden_size, shape.output_bias)
        if self.qk_norm is not None:
            for name, projection in zip(self.qk_norm.names, (self.q_proj, self.k_proj), strict=True):
                size = self.head_dim if self.qk_norm.per_head else projection.weight.shape[0]
                setattr(self, name, RMSNorm(size, shape.norm_epsilon, shape.norm_offset))

    def forward(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Attend to the visible positions; map [B, S, D] to [B, S, D]."""
        # No variable holds the projections, so that `attend` can free them.
        return self._project_out(self.attend(recompute_region("attention_column_ln", self._project, x_BSD), inputs))

    def from_projections(self, projected: Sequence[paddle.Tensor], inputs: AttentionInputs) -> paddle.Tensor:
        """Attend with the outputs of the layers in `input_names`, each [B, S, heads * H]; return [B, S, D]."""
        return self._project_out(self.attend(projected, inputs))

    def attend(self, projected: Sequence[paddle.Tensor], inputs: AttentionInputs) -> paddle.Tensor:
        """Attend with projected queries, keys and values; return the input of `o_proj`, [B, S, heads * H]."""
        q_BSE, k_BSE, v_BSE = projected
        q_BSNH, k_BSKH = self._norm_and_rotate(q_BSE, k_BSE, inputs)
        v_BSKH = self._values(v_BSE)
        del projected, q_BSE, k_BSE, v_BSE  # free the pre-RoPE queries and keys
        if inputs.layer is not None:
            inputs.layer.keep(k_BSKH, v_BSKH)
        if inputs.cache is None:
            tensors = (q_BSNH, k_BSKH, v_BSKH, *(inputs.prefix or ()))
            out_BSNH = recompute_region("flash_attn", self._attention_over(inputs), *tensors)
        else:
            out_BSNH = inputs.cache.attend(
                *(self.layer_index, q_BSNH, k_BSKH, v_BSKH),
                *(self.window, self.scale, self.implementation, self.score_options),
            )
        return out_BSNH.flatten(2)

    def split_prefix(self, prefix: paddle.Tensor) -> KeyValuePrefix:
        return prefix[:, 0], prefix[:, 1]

    def join_prefix(self, pair: KeyValuePrefix) -> paddle.Tensor:
        return paddle.stack(list(pair), axis=1)

    def _project(self, x_BSD: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        return tuple(getattr(self, name)(x_BSD) for name in self.input_names)

    def _project_out(self, attended_BSE: paddle.Tensor) -> paddle.Tensor:
        return recompute_region("attention_row_ln", self.o_proj, attended_BSE)

    def _norm_and_rotate(
        self, q_BSE: paddle.Tensor, k_BSE: paddle.Tensor, inputs: AttentionInputs
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Apply the QK norms and RoPE to queries and keys; map [B, S, heads * H] to [B, S, heads, H]."""
        kind, fused = self.qk_norm, self._fused_norms()
        if kind is not None and not kind.per_head:
            q_BSE, k_BSE = self._norm_both(q_BSE, k_BSE)
        q_BSNH, k_BSKH = self._heads(q_BSE), self._heads(k_BSE)
        per_head = kind if kind is not None and kind.per_head and fused is None else None
        if per_head is not None and not per_head.after_rotation:
            q_BSNH, k_BSKH = self._norm_both(q_BSNH, k_BSKH)
        if self.rotates:
            rotation = inputs.rotations[self.layer_index]
            q_BSNH, k_BSKH = rotate_heads(q_BSNH, k_BSKH, *rotation, self.interleaved, fused)
        if per_head is not None and per_head.after_rotation:
            q_BSNH, k_BSKH = self._norm_both(q_BSNH, k_BSKH)
        if inputs.query_scale is not None:
            q_BSNH = q_BSNH * inputs.query_scale.astype(q_BSNH.dtype)
        return q_BSNH, k_BSKH

    def _values(self, v_BSE: paddle.Tensor) -> paddle.Tensor:
        """Map projected values [B, S, heads * H] to the values that attention reads, [B, S, heads, H]."""
        return self._heads(v_BSE)

    def _norm_both(self, q: paddle.Tensor, k: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Apply the QK norms as separate layers."""
        assert self.qk_norm is not None
        q_norm, k_norm = (getattr(self, name) for name in self.qk_norm.names)
        return q_norm(q), k_norm(k)

    def _fused_norms(self) -> HeadNorms | None:
        """Return the per-head QK norms that the RoPE op can apply; None if a norm has an adapter, shards or hooks."""
        if self.qk_norm is None or not self.qk_norm.per_head or not self.rotates:
            return None
        q_norm, k_norm = (getattr(self, name) for name in self.qk_norm.names)
        if any(type(norm) is not RMSNorm or norm.shards or has_forward_hooks(norm) for norm in (q_norm, k_norm)):
            return None
        options = q_norm.epsilon, q_norm.offset, self.qk_norm.after_rotation
        return HeadNorms(q_norm.weight, k_norm.weight, *options)

    def _heads(self, x_BSE: paddle.Tensor) -> paddle.Tensor:
        # Infer the number of heads from the projection: under tensor parallelism, a rank holds a shard of the heads.
        return x_BSE.reshape([0, 0, x_BSE.shape[-1] // self.head_dim, self.head_dim])
