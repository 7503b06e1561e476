"""Gemma 3, text only: Gemma 2 with QK norms and a separate RoPE base for sliding windows. arXiv:2503.19786."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import QK_NORMS, SANDWICH, Architecture, Key
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.families.gemma2 import gemma2_differences, gemma2_settings
from paddlenlp_ext.models.families.qwen3 import QWEN3_TENSOR_PLAN
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import windows_by_type, with_rope_by_layer_type
from paddlenlp_ext.nn.attention import QKNorm

_THETA, _LOCAL_THETA, _PATTERN = 1_000_000.0, 10_000.0, 6


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    thetas = {
        "full_attention": config.get("rope_theta") or _THETA,
        "sliding_attention": config.get("rope_local_base_freq") or _LOCAL_THETA,
    }
    return with_rope_by_layer_type(config, config.get("sliding_window_pattern") or _PATTERN, thetas)


def _differences(config: ConfigReader) -> dict[str, Any]:
    if config.value("attn_logit_softcapping"):  # transformers ignores this key for Gemma 3
        raise ValueError(
            f"attn_logit_softcapping {config.value('attn_logit_softcapping')!r} in config.json is not supported for "
            "gemma3_text; set it to null"
        )
    return {**gemma2_differences(config), "qk_norm": QKNorm(), "windows": windows_by_type(config, ())}


FAMILIES.register("gemma3_text")(
    Family(
        "Gemma3ForCausalLM",
        _differences,
        QWEN3_TENSOR_PLAN,
        {
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
        activation_key="hidden_activation",
        complete=_complete,
        classifier="Gemma3TextForSequenceClassification",
    )
)

ARCHITECTURES.register("gemma3_text")(
    Architecture(
        "gemma3",
        "Gemma3ForCausalLM",
        {**SANDWICH, **QK_NORMS},
        keys={
            "sliding_window": Key("attention.sliding_window"),
            "rope_local_base_freq": Key("rope.freq_base_swa", float, default=_LOCAL_THETA),
        },
        constants={"hidden_activation": "gelu_pytorch_tanh", "sliding_window_pattern": _PATTERN},
        settings=lambda file: gemma2_settings(file, largest=62),
        norm_offset=1.0,
        has_window=True,
    )
)
