"""Gemma 2: norms before and after each block, soft-caps, and sliding windows in every other layer. arXiv:2408.00118."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import SANDWICH, Architecture, Key, attention_bias, count
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import windows_by_type


def gemma2_differences(config: ConfigReader) -> dict[str, Any]:
    """Return the `DecoderConfig` attributes of Gemma 2.

    Raises:
        ValueError: see `windows_by_type`; or attention is bidirectional.
    """
    if config.value("use_bidirectional_attention"):
        raise ValueError(
            "use_bidirectional_attention in config.json is not supported, because attention is causal; set it to false"
        )
    bias = bool(config.value("attention_bias"))
    layers = range(config.size("num_hidden_layers"))
    types = ["full_attention" if layer % 2 else "sliding_attention" for layer in layers]
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "attention_scale": float(config.value("query_pre_attn_scalar")) ** -0.5,
        "attention_softcap": soft_cap(config, "attn_logit_softcapping"),
        "logit_softcap": soft_cap(config, "final_logit_softcapping"),
        "norm_offset": 1.0,
        "scales_embeddings": True,
        "layer": "sandwich",
        "windows": windows_by_type(config, types),
    }


def soft_cap(config: ConfigReader, key: str) -> float | None:
    """Return the soft-cap under `key`; None if the config has no soft-cap.

    Raises:
        ValueError: the value is not above 0.
    """
    value = config.value(key)
    if value is None:
        return None
    if not float(value) > 0:
        raise ValueError(f"{key} in config.json must be above 0, or null for no soft-cap, got {value!r}")
    return float(value)


FAMILIES.register("gemma2")(
    Family(
        "Gemma2ForCausalLM",
        gemma2_differences,
        DECODER_TENSOR_PLAN,
        {
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
        activation_key="hidden_activation",
    )
)


def gemma2_settings(file: GgufFile, largest: int) -> dict[str, Any]:
    """Return the keys of config.json that are computed from several keys of a GGUF file.

    GGUF files do not store the scale of the attention scores. In the largest model of a Gemma family, the scale is
    1 / sqrt(hidden_size / num_attention_heads). In smaller models of the family, the scale is
    1 / sqrt(head_dim).

    Args:
        file: the GGUF file.
        largest: number of layers in the largest model of the family.
    """
    if count(file, "block_count") == largest:
        scalar = count(file, "embedding_length") // count(file, "attention.head_count")
    else:
        scalar = count(file, "attention.key_length")
    return {**attention_bias(file), "query_pre_attn_scalar": scalar}


ARCHITECTURES.register("gemma2")(
    Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        SANDWICH,
        keys={
            "sliding_window": Key("attention.sliding_window"),
            "attn_logit_softcapping": Key("attn_logit_softcapping", float, default=50.0),
            "final_logit_softcapping": Key("final_logit_softcapping", float, default=30.0),
        },
        constants={"hidden_activation": "gelu_pytorch_tanh"},
        settings=lambda file: gemma2_settings(file, largest=46),
        norm_offset=1.0,
        has_window=True,
    )
)
