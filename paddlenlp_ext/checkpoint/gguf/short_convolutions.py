"""GGUF layout of decoders with gated short convolutions and attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import Architecture, Key, kv_heads_by_layer
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile

_IN_BLOCK = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_TOP_LEVEL = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"}


def convolution_architecture(
    name: str,
    class_name: str,
    in_block: Mapping[str, str] | None = None,
    keys: Mapping[str, Key] | None = None,
    settings: Callable[[GgufFile], dict[str, Any]] = lambda file: {},
    **fields: Any,
) -> Architecture:
    """Return the GGUF layout of a family. The arguments are attributes of `Architecture`.

    `in_block`, `keys` and `settings` extend the names, keys and settings that all families share.
    """
    return Architecture(
        name,
        class_name,
        {**_IN_BLOCK, **(in_block or {})},
        top_level=_TOP_LEVEL,
        keys={"conv_L_cache": Key("shortconv.l_cache"), **(keys or {})},
        settings=lambda file: {"layer_types": _layer_types(file), **settings(file)},
        norm_epsilon=("attention.layer_norm_rms_epsilon", "norm_eps"),
        has_layers_without_attention=True,
        squeezed={"conv.conv.weight": 1},
        **fields,
    )


def _layer_types(file: GgufFile) -> list[str]:
    """Return `layer_types` of config.json: layers without key-value heads are convolutions."""
    return ["full_attention" if heads else "conv" for heads in kv_heads_by_layer(file)]
