"""Multi-head latent attention (MLA): keys and values of all heads are computed from one latent per position.

DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434, section 2.1. x is the hidden state, and [c] is the normalized latent c:

    c, r     = kv_a_proj_with_mqa(x)             latent, and one key that all heads share
    U_n c, V_n c = kv_b_proj([c])                of head n
    u_n, p_n = q_b_proj([q_a_proj(x)])           or q_proj(x)
    score    = u_n (U_n c) + RoPE(p_n) RoPE(r)   values: V_n c

| | stored in the cache per position and layer |
| --- | --- |
| K grouped key-value heads | 2 K H values |
| latents | L + R values: [c] and RoPE(r) |

During decoding, queries attend to the cached latents directly (ops/attention/latent_decode.py). A trained prefix also
consists of latents and shared keys.

Shapes: B batch, S sequence, P positions of a prefix, D hidden, N heads, L latent, R rotated channels, U unrotated
channels, H = U + R, E channels of values.
"""

from __future__ import annotations

from dataclasses import dataclass

import paddle

from paddlenlp_ext.nn.attention import AttentionInputs, AttentionLayer, AttentionShape
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.recompute import recompute_region
from paddlenlp_ext.nn.rms_norm import RMSNorm
from paddlenlp_ext.nn.rotary_embedding import Rotation
from paddlenlp_ext.ops.attention import KeyValuePrefix, attention
from paddlenlp_ext.ops.attention.key_value_cache import KeyValueCache
from paddlenlp_ext.ops.attention.latent_decode import latent_decode_attention
from paddlenlp_ext.paddle_compat import axis_sizes

_NORM_EPSILON = 1e-6  # Published models use this epsilon for latent norms and ignore rms_norm_eps in config.json.


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Sizes of latent attention.

    Attributes:
        query_rank: size of the query latent; None: queries are a projection of the hidden states.
        kv_rank: size L of the latent of keys and values.
        unrotated_dim: number U of unrotated channels of a query or key.
        rotated_dim: number R of rotated channels of a query or key.
        value_dim: number E of channels of a value.
    """

    query_rank: int | None
    kv_rank: int
    unrotated_dim: int
    rotated_dim: int
    value_dim: int


class LatentAttention(AttentionLayer):
    """Multi-head latent attention of one decoder layer."""

    def __init__(self, shape: AttentionShape, latent: LatentShape, layer_index: int) -> None:
        super().__init__(shape, layer_index)
        assert shape.head_dim == latent.unrotated_dim + latent.rotated_dim, f"{shape}, {latent}"
        self.latent = latent
        self.prefix_shape = (latent.kv_rank + latent.rotated_dim,)
        hidden_size, num_heads, rank = shape.hidden_size, shape.num_heads, latent.query_rank
        self.input_names = ("q_proj" if rank is None else "q_a_proj", "kv_a_proj_with_mqa")
        self.latent_names = ("kv_b_proj",) if rank is None else ("q_b_proj", "kv_b_proj")
        if rank is None:
            self.q_proj = Linear(hidden_size, num_heads * shape.head_dim)
        else:
            self.q_a_proj = Linear(hidden_size, rank, shape.qkv_bias)
            self.q_a_layernorm = RMSNorm(rank, _NORM_EPSILON, shape.norm_offset)
            self.q_b_proj = Linear(rank, num_heads * shape.head_dim)
        self.kv_a_proj_with_mqa = Linear(hidden_size, latent.kv_rank + latent.rotated_dim, shape.qkv_bias)
        self.kv_a_layernorm = RMSNorm(latent.kv_rank, _NORM_EPSILON, shape.norm_offset)
        self.kv_b_proj = Linear(latent.kv_rank, num_heads * (latent.unrotated_dim + latent.value_dim))
        self.o_proj = Linear(num_heads * latent.value_dim, hidden_size, shape.output_bias)

    def forward(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Attend to the visible positions; map [B, S, D] to [B, S, D]."""
        if inputs.cache is not None:
            out_BSNE = self._attend_cached(x_BSD, inputs, inputs.cache)
        else:
            queries, key_BSR, heads = recompute_region("attention_column_ln", self._project, x_BSD)
            q_BSNH = paddle.concat(self._split_queries(queries, inputs), axis=-1)
            k_BSNH, v_BSNE = self._keys_and_values(heads, self._rotate_key(key_BSR, inputs.rotations[self.layer_index]))
            prefix = () if inputs.prefix is None else self._prefix_heads(inputs.prefix)
            out_BSNE = recompute_region("flash_attn", self._attention_over(inputs), q_BSNH, k_BSNH, v_BSNE, *prefix)
        return recompute_region("attention_row_ln", self.o_proj, out_BSNE.flatten(2))

    def split_prefix(self, prefix: paddle.Tensor) -> KeyValuePrefix:
        rank = self.latent.kv_rank
        return prefix[:, :rank].unsqueeze(1), prefix[:, rank:].unsqueeze(1)

    def join_prefix(self, pair: KeyValuePrefix) -> paddle.Tensor:
        return paddle.concat([x_P1L.squeeze(1) for x_P1L in pair], axis=-1)

    def _project(self, x_BSD: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
        """Return the queries [B, S, N * H], the shared key [B, S, R] before RoPE, and the output of `kv_b_proj`."""
        latents_BSL, key_BSR = self._compress(x_BSD)
        return self._queries(x_BSD), key_BSR, self.kv_b_proj(latents_BSL)

    def _queries(self, x_BSD: paddle.Tensor) -> paddle.Tensor:
        if self.latent.query_rank is None:
            return self.q_proj(x_BSD)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSD)))

    def _compress(self, x_BSD: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return the normalized latents [B, S, L], and the shared key [B, S, R] before RoPE."""
        both = self.kv_a_proj_with_mqa(x_BSD)
        rank = self.latent.kv_rank
        return self.kv_a_layernorm(both[..., :rank]), both[..., rank:]

    def _split_queries(self, queries: paddle.Tensor, inputs: AttentionInputs) -> list[paddle.Tensor]:
        """Scale queries; split into unrotated channels [B, S, N, U] and RoPE-rotated channels [B, S, N, R]."""
        q_BSNH = queries.reshape([0, 0, queries.shape[-1] // self.head_dim, self.head_dim])
        if inputs.query_scale is not None:
            q_BSNH = q_BSNH * inputs.query_scale.astype(q_BSNH.dtype)
        size = self.latent.unrotated_dim
        return [q_BSNH[..., :size], self.rotate(q_BSNH[..., size:], *inputs.rotations[self.layer_index])]

    def _rotate_key(self, key_BSR: paddle.Tensor, rotation: Rotation) -> paddle.Tensor:
        return self.rotate(key_BSR.unsqueeze(2), *rotation)

    def _keys_and_values(self, heads: paddle.Tensor, key_BS1R: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return keys [B, S, N, H] and values [B, S, N, E] from the output of `kv_b_proj` and the shared key."""
        size = self.latent.unrotated_dim
        both = heads.reshape([*heads.shape[:2], -1, size + self.latent.value_dim])
        shared = key_BS1R.expand([*both.shape[:3], self.latent.rotated_dim])
        return paddle.concat([both[..., :size], shared.astype(both.dtype)], axis=-1), both[..., size:]

    def _prefix_heads(self, prefix: KeyValuePrefix) -> KeyValuePrefix:
        """Expand a prefix of latents [P, 1, L] and shared keys [P, 1, R] to keys [P, N, H] and values [P, N, E]."""
        latents_P1L, keys_P1R = prefix
        keys, values = self._keys_and_values(self.kv_b_proj(latents_P1L.unsqueeze(0).squeeze(2)), keys_P1R.unsqueeze(0))
        return keys[0], values[0]

    def _attend_cached(self, x_BSD: paddle.Tensor, inputs: AttentionInputs, cache: KeyValueCache) -> paddle.Tensor:
        """Append latents and shared keys to the cache; return the attention output [B, S, N, E]."""
        (latents_BSL, key_BSR), options = self._compress(x_BSD), self.score_options
        key_BS1R = self._rotate_key(key_BSR, inputs.rotations[self.layer_index])
        q_BSNU, q_BSNR = self._split_queries(self._queries(x_BSD), inputs)
        cached = cache.append(self.layer_index, latents_BSL.unsqueeze(2), key_BS1R, self.window)
        if cached.layout is not None:  # no earlier positions: compute attention as in training
            k_BSNH, v_BSNE = self._keys_and_values(self.kv_b_proj(latents_BSL), key_BS1R)
            prefix = None if cached.prefix is None else self._prefix_heads(cached.prefix)
            q_BSNH = paddle.concat([q_BSNU, q_BSNR], axis=-1)
            return attention(q_BSNH, k_BSNH, v_BSNE, cached.layout, self.scale, self.implementation, prefix, options)
        assert cached.visible is not None, "a layer without a layout must have visible positions"
        to_keys_NUL, to_values_NLE = cache.derived(
            ("latent", self.layer_index), lambda: self._matrices_by_head(latents_BSL.dtype)
        )
        q_BSNL = _multiply_heads(q_BSNU, to_keys_NUL)
        mean_BSNL = latent_decode_attention(q_BSNL, q_BSNR, *cached.tensors, cached.visible, self.scale, options)
        return _multiply_heads(mean_BSNL, to_values_NLE)

    @paddle.no_grad()
    def _matrices_by_head(self, dtype: paddle.dtype) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return matrices per head: from queries to latents [N, U, L], and from latents to values [N, L, E].

        The matrices are `kv_b_proj` applied to unit vectors, and therefore include adapters and quantization. The
        direct call of `forward` skips forward hooks. A hook would mistake the unit vectors for positions of a sequence.
        """
        unit_1LL = paddle.eye(self.latent.kv_rank, dtype=dtype).unsqueeze(0)
        size, value_dim = self.latent.unrotated_dim, self.latent.value_dim
        both = self.kv_b_proj.forward(unit_1LL).reshape([self.latent.kv_rank, -1, size + value_dim])
        return both[..., :size].transpose([1, 2, 0]).contiguous(), both[..., size:].transpose([1, 0, 2]).contiguous()


def _multiply_heads(x_BSNI: paddle.Tensor, matrices_NIO: paddle.Tensor) -> paddle.Tensor:
    """Multiply the channels [I] of each head by the head's matrix [I, O]; return [B, S, N, O]."""
    batch, length, heads, _ = axis_sizes(x_BSNI)
    by_head = paddle.matmul(x_BSNI.flatten(0, 1).transpose([1, 0, 2]), matrices_NIO)
    return by_head.transpose([1, 0, 2]).reshape([batch, length, heads, matrices_NIO.shape[-1]])
