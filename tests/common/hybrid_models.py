"""Settings of tiny models with other mixers or layer sizes, in which they differ from TINY_LLAMA."""

from __future__ import annotations

from typing import Any

from tests.common.models import TINY_MAMBA, TINY_SINGLE_BLOCKS

LFM2 = {
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
    "conv_bias": True,
}
QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 18,  # normalizing shorter keys amplifies rounding
    "linear_value_head_dim": 10,
}
GEMMA_4 = {
    "model_type": "gemma4_text",
    "head_dim": 8,
    "global_head_dim": 12,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}
GRANITE_4_H = {**TINY_MAMBA, "mamba_n_groups": 1}
NEMOTRON_H = {**TINY_SINGLE_BLOCKS, "n_routed_experts": 6}


def repeated(model: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a model with the layers of `model` twice."""
    return {**model, "num_hidden_layers": 4, "layer_types": model["layer_types"] * 2}
