"""Gemma 1: Llama with norms of scale 1 + w, scaled embeddings and GeGLU. arXiv:2403.08295."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, Architecture, attention_bias
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import full_attention

_ACTIVATION = "gelu_pytorch_tanh"


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    # Published files name the exact GELU, but the models were trained with its tanh approximation.
    return {**config, "hidden_act": _ACTIVATION} if config.get("hidden_act") == "gelu" else config


def _differences(config: ConfigReader) -> dict[str, Any]:
    if config.value("use_bidirectional_attention"):
        raise ValueError(
            "use_bidirectional_attention in config.json is not supported, because attention is causal; set it to false"
        )
    bias = bool(config.value("attention_bias"))
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "norm_offset": 1.0,
        "scales_embeddings": True,
        "windows": full_attention(config),
    }


FAMILIES.register("gemma")(
    Family(
        "GemmaForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {
            "head_dim": 256,
            "hidden_act": _ACTIVATION,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        complete=_complete,
    )
)

ARCHITECTURES.register("gemma")(
    Architecture(
        "gemma",
        "GemmaForCausalLM",
        PRE_NORM,
        constants={"hidden_act": _ACTIVATION},
        settings=attention_bias,
        norm_offset=1.0,
    )
)
