"""Hunyuan, dense: Llama with QK norms per head after RoPE. Tencent 2025."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, Architecture, attention_bias
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import full_attention
from paddlenlp_ext.nn.attention import QKNorm
from paddlenlp_ext.nn.rope import stored_settings
from paddlenlp_ext.sharding_spec import TensorPlan

HUNYUAN_TENSOR_PLAN: TensorPlan = {
    **DECODER_TENSOR_PLAN,
    "model.layers.*.self_attn.query_layernorm": "replicated",
    "model.layers.*.self_attn.key_layernorm": "replicated",
}


def complete_hunyuan(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the NTK scaling factor `alpha` with the `rope_theta` that results from the scaling.

    Config files call this scaling "dynamic", although the factor is constant.
    """
    settings = stored_settings(config)
    if not settings.get("alpha"):
        return config
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if head_dim == 2:
        raise ValueError("alpha in the rope settings of config.json needs a head_dim above 2")
    theta = settings.get("rope_theta") or config.get("rope_theta") or 10_000.0
    base = theta * settings["alpha"] ** (head_dim / (head_dim - 2))
    if base <= 1:
        raise ValueError(
            f"alpha {settings['alpha']} in the rope settings of config.json changes rope_theta {theta} to {base:.3g}; "
            "rope_theta must stay above 1"
        )
    return {**config, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": base}}


def hunyuan_differences(config: ConfigReader) -> dict[str, Any]:
    """Return the differences from the common decoder, for a model without experts."""
    bias = bool(config.value("attention_bias"))
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "qk_norm": QKNorm(("query_layernorm", "key_layernorm"), after_rotation=True),
        "windows": full_attention(config),
    }


FAMILIES.register("hunyuan_v1_dense")(
    Family(
        "HunYuanDenseV1ForCausalLM",
        hunyuan_differences,
        HUNYUAN_TENSOR_PLAN,
        {"rms_norm_eps": 1e-5},
        complete=complete_hunyuan,
    )
)

HUNYUAN_NAMES = {**PRE_NORM, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
"""Names of tensors in a GGUF block, and their names in a decoder layer."""

ARCHITECTURES.register("hunyuan_v1_dense")(
    Architecture("hunyuan-dense", "HunYuanDenseV1ForCausalLM", HUNYUAN_NAMES, settings=attention_bias)
)
