"""Granite SWA: Granite with sliding windows, attention sinks, and a RoPE base per layer. IBM 2026."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.models.families.granite import GRANITE_MULTIPLIERS, granite_differences
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import windows_by_type


def _differences(config: ConfigReader) -> dict[str, Any]:
    layers = range(config.size("num_hidden_layers"))
    types = ["sliding_attention" if layer % 4 else "full_attention" for layer in layers]
    thetas = config.value("layer_rope_theta") or [1] * len(layers)  # 0 marks a layer without RoPE
    return {
        **granite_differences(config),
        "attention_sinks": True,
        "rotates": tuple(theta != 0 for theta in thetas),
        "windows": windows_by_type(config, types),
    }


FAMILIES.register("granite_swa")(
    Family(
        "GraniteSWAForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {
            **GRANITE_MULTIPLIERS,
            "max_position_embeddings": 8192,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "tie_word_embeddings": True,
        },
    )
)
