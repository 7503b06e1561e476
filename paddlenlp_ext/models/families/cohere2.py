"""Cohere 2 (Command R7B): attention parallel to the MLP after one layer norm, and RoPE only in sliding-window layers.

Cohere 2025, Command A, arXiv:2504.00698.
"""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import PROJECTIONS, Architecture, Key, attention_bias
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import windows_by_type


def _differences(config: ConfigReader) -> dict[str, Any]:
    period = config.size("sliding_window_pattern", 4)
    layers = range(config.size("num_hidden_layers"))
    types = ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in layers]
    windows = windows_by_type(config, types)
    bias = bool(config.value("attention_bias"))
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "rms_norm_eps": float(config.value("layer_norm_eps")),
        "logit_scale": float(config.value("logit_scale")),
        "interleaved_rope": True,
        "rotates": tuple(window is not None for window in windows),
        "layer": "parallel",
        "windows": windows,
    }


FAMILIES.register("cohere2")(
    Family(
        "Cohere2ForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "max_position_embeddings": 8192,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
    )
)

ARCHITECTURES.register("cohere2")(
    Architecture(
        "cohere2",
        "Cohere2ForCausalLM",
        {**PROJECTIONS, "attn_norm": "input_layernorm"},
        keys={"sliding_window": Key("attention.sliding_window"), "logit_scale": Key("logit_scale", float)},
        constants={"sliding_window_pattern": 4},
        settings=attention_bias,
        norm_epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
        has_window=True,
    )
)
