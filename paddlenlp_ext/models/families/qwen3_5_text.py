"""Qwen3.5: gated delta nets in three of four layers, gated attention in the others. Qwen team 2026, arXiv:2412.06464.

Qwen3.6 and Qwen3.8 have the same `model_type`. The `model_type` of the text model in a composite folder is
`qwen3_5_text`. The three position ids of a token of the multimodal RoPE are equal in text, so RoPE is the usual one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.gguf.gated_delta_nets import delta_net_architecture
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.families.qwen3 import QWEN3_TENSOR_PLAN
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
        ValueError: `layer_types` has an unknown entry, its length is not the number of layers, or the number of value
            heads is not a multiple of the number of key heads.
    """
    layers, types = config.size("num_hidden_layers"), config.value("layer_types")
    if {*types} - {"full_attention", "linear_attention"} or len(types) != layers:
        raise ValueError(
            f"layer_types in config.json must be full_attention or linear_attention for each of the {layers} layers, "
            f"got {len(types)} entries: {', '.join(sorted({*types}))}"
        )
    shape = make(
        hidden_size=config.size("hidden_size"),
        num_key_heads=config.size("linear_num_key_heads"),
        num_value_heads=config.size("linear_num_value_heads"),
        key_dim=config.size("linear_key_head_dim"),
        value_dim=config.size("linear_value_head_dim"),
        num_taps=config.size("linear_conv_kernel_dim"),
        norm_epsilon=float(config.value("rms_norm_eps")),
    )
    if shape.num_value_heads % shape.num_key_heads:
        raise ValueError(
            f"linear_num_value_heads {shape.num_value_heads} in config.json is not a multiple of linear_num_key_heads "
            f"{shape.num_key_heads}"
        )
    bias = bool(config.value("attention_bias"))
    return {
        "attention_gate": "q_proj",
        "mixers": tuple(shape if kind == "linear_attention" else None for kind in types),
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
