"""Qwen3.5: gated delta nets in three of four layers, gated attention in the others. Qwen team 2026, arXiv:2412.06464.

Qwen3.6 and Qwen3.8 have the same `model_type`. The `model_type` of the text model in a composite model is
`qwen3_5_text`. The multimodal RoPE has three position ids per token. In text, they are equal, so the result is standard
RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.gguf.gated_delta_nets import delta_net_architecture
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.families.qwen3 import QWEN3_TENSOR_PLAN
from paddlenlp_ext.models.gated_delta_config import delta_net_mixers
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import full_attention
from paddlenlp_ext.nn.attention import QKNorm
from paddlenlp_ext.nn.gated_delta_net import GatedDeltaShape
from paddlenlp_ext.sharding_spec import TensorPlan

QWEN3_5_TENSOR_PLAN: TensorPlan = {
    **QWEN3_TENSOR_PLAN,
    "model.layers.*.linear_attn.in_proj_qkv": "replicated",
    "model.layers.*.linear_attn.in_proj_z": "colwise",
    "model.layers.*.linear_attn.in_proj_a": "colwise",
    "model.layers.*.linear_attn.in_proj_b": "colwise",
    "model.layers.*.linear_attn.conv1d": "replicated",
    "model.layers.*.linear_attn.norm": "replicated",
    "model.layers.*.linear_attn.out_proj": "rowwise",
}
QWEN3_5_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.25,
}


def complete_qwen3_5(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json dict with `layer_types`, derived from `full_attention_interval` if the key is absent."""
    interval = config.get("full_attention_interval") or 4
    types = config.get("layer_types") or [
        "linear_attention" if (layer + 1) % interval else "full_attention"
        for layer in range(config["num_hidden_layers"])
    ]
    return {**config, "layer_types": types}


def qwen3_5_differences(config: ConfigReader, make: type[GatedDeltaShape] = GatedDeltaShape) -> dict[str, Any]:
    """Return the differences from the common decoder, for a model without experts.

    Args:
        config: config of the model.
        make: class of the sizes of the gated delta nets.

    Raises:
        ValueError: the config of the gated delta nets is invalid (`delta_net_mixers`).
    """
    bias = bool(config.value("attention_bias"))
    return {
        "attention_gate": "q_proj",
        "mixers": delta_net_mixers(config, make, float(config.value("rms_norm_eps"))),
        "norm_offset": 1.0,
        "output_bias": bias,
        "qk_norm": QKNorm(),
        "qkv_bias": bias,
        "windows": full_attention(config),
    }


FAMILIES.register("qwen3_5_text")(
    Family("Qwen3_5ForCausalLM", qwen3_5_differences, QWEN3_5_TENSOR_PLAN, QWEN3_5_DEFAULTS, complete=complete_qwen3_5)
)

ARCHITECTURES.register("qwen3_5_text")(delta_net_architecture("qwen35", "Qwen3_5ForCausalLM"))
