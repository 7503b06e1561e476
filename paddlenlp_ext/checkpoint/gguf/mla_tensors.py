"""Multi-head latent attention (MLA) in GGUF files, which split kv_b_proj into key and value tensors.

in a GGUF file                               as read
attn_k_b [N, L, U], attn_v_b [N, E, L]       self_attn.kv_b_proj [N * (U + E), L]
attn_kv_b [N * (U + E), L], in older files   self_attn.kv_b_proj [N * (U + E), L]

Shapes: N heads, L latent size, U key channels without rotation, E value channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.file_layouts.base import split_layer
from paddlenlp_ext.checkpoint.file_layouts.joined_tensors import JoinedTensors
from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, count
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.safetensors import LazyTensor
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard

LATENT_ATTENTION = {
    **{name: local_name for name, local_name in PRE_NORM.items() if name not in ("attn_k", "attn_v")},
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
"""Name in a GGUF block -> name in a decoder layer."""
_BOTH, _KEYS, _VALUES = (f"self_attn.{name}.weight" for name in ("kv_b_proj", "k_b_proj", "v_b_proj"))


def latent_settings(file: GgufFile) -> dict[str, Any]:
    """Return the keys of config.json that specify the sizes of latent attention.

    In files with separate key and value tensors, the metadata `key_length` and `value_length` are latent sizes;
    `key_length_mla` and `value_length_mla` are the sizes of a head.

    Raises:
        ValueError: a head has no key channels without rotation, or metadata is damaged.
    """
    heads, rotated = count(file, "attention.head_count"), count(file, "rope.dimension_count")
    keys = count(file, "attention.key_length_mla", count(file, "attention.key_length"))
    values = count(file, "attention.value_length", count(file, "embedding_length") // heads)
    if keys <= rotated:
        raise ValueError(
            f"{file.path}: {keys} key channels, but rope.dimension_count is {rotated}; the file is damaged"
        )
    return {
        "num_key_value_heads": heads,
        "q_lora_rank": count(file, "attention.q_lora_rank", 0, minimum=0) or None,
        "kv_lora_rank": count(file, "attention.kv_lora_rank"),
        "qk_nope_head_dim": keys - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": count(file, "attention.value_length_mla", values),
    }


def latent_metadata(latent: Any, splits_kv_b: bool) -> dict[str, int]:
    """Return the metadata for latent attention, without the architecture prefix; the inverse of `latent_settings`.

    Args:
        latent: sizes of the attention (`LatentShape`).
        splits_kv_b: whether kv_b_proj is stored as separate key and value tensors.
    """
    keys = latent.unrotated_dim + latent.rotated_dim
    sizes = {"rope.dimension_count": latent.rotated_dim, "attention.kv_lora_rank": latent.kv_rank}
    if latent.query_rank is not None:
        sizes["attention.q_lora_rank"] = latent.query_rank
    if not splits_kv_b:
        return {**sizes, "attention.key_length": keys, "attention.value_length": latent.value_dim}
    return {
        **sizes,
        "attention.key_length": latent.kv_rank + latent.rotated_dim,
        "attention.value_length": latent.kv_rank,
        "attention.key_length_mla": keys,
        "attention.value_length_mla": latent.value_dim,
    }


def split_latents(tensors: Mapping[str, LazyTensor], config: Any) -> dict[str, LazyTensor]:
    """Split kv_b_proj into key and value tensors; the inverse of `JoinedLatents`.

    Args:
        tensors: Hugging Face name -> tensor.
        config: config of the model (`DecoderConfig`).
    """
    heads, unrotated = config.num_attention_heads, config.latent.unrotated_dim
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        prefix, local_name = split_layer(name)
        if local_name != _BOTH:
            result[name] = tensor
            continue
        rows, rank = tensor.shape
        keys = (heads, rank, unrotated)
        values = (heads, rows // heads - unrotated, rank)
        result[prefix + _KEYS] = LazyTensor(keys, tensor.dtype, partial(_read_keys, tensor, heads, unrotated))
        result[prefix + _VALUES] = LazyTensor(values, tensor.dtype, partial(_read_values, tensor, heads, unrotated))
    return result


def _read_keys(both: LazyTensor, heads: int, unrotated: int) -> np.ndarray:
    """Return the key tensor [N, L, U] of a kv_b_proj weight."""
    return np.swapaxes(both.read().reshape(heads, -1, both.shape[1])[:, :unrotated], 1, 2)


def _read_values(both: LazyTensor, heads: int, unrotated: int) -> np.ndarray:
    """Return the value tensor [N, E, L] of a kv_b_proj weight."""
    return both.read().reshape(heads, -1, both.shape[1])[:, unrotated:]


class JoinedLatents(JoinedTensors):
    """Tensors of a GGUF file, with key and value tensors joined into kv_b_proj as in the Hugging Face checkpoint.

    Raises:
        ValueError: the key tensor or the value tensor of a layer is missing.
    """

    def __init__(self, source: WeightSource) -> None:
        stored = source.names()
        parts: dict[str, tuple[str, ...]] = {}
        for name in stored:
            prefix, local_name = split_layer(name)
            if local_name not in (_KEYS, _VALUES):
                parts[name] = (name,)
            elif prefix + _BOTH not in stored:
                parts[prefix + _BOTH] = (prefix + _KEYS, prefix + _VALUES)
        super().__init__(source, parts)

    def shape(self, name: str) -> tuple[int, ...]:
        shapes = [self._source.shape(part) for part in self._parts[name]]
        if len(shapes) == 1:
            return shapes[0]
        (heads, rank, unrotated), (_, channels, _) = shapes
        return heads * (unrotated + channels), rank

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        parts = self._parts[name]
        if len(parts) == 1:
            return self._source.read(name, dtype, shard)
        keys_NLU, values_NEL = (self._source.read(part, dtype or self.dtype(name)) for part in parts)
        values = np.concatenate([np.swapaxes(keys_NLU, 1, 2), values_NEL], axis=1).reshape(self.shape(name))
        return values if shard is None else values[shard.index]
