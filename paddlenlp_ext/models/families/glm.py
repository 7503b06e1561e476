"""GLM-4-9B: Llama with RoPE on half of the channels, and biases of q, k and v. arXiv:2406.12793."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import full_attention

GLM_FUSED_LAYERS = {"gate_up_proj": ("gate_proj", "up_proj")}
GLM_DEFAULTS: dict[str, Any] = {
    "attention_bias": True,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
}


def glm_differences(config: ConfigReader) -> dict[str, Any]:
    """Return the `DecoderConfig` attributes of GLM-4-9B."""
    return {
        "qkv_bias": bool(config.value("attention_bias")),
        "interleaved_rope": True,
        "windows": full_attention(config),
    }


FAMILIES.register("glm")(
    Family("GlmForCausalLM", glm_differences, DECODER_TENSOR_PLAN, GLM_DEFAULTS, fused_layers=GLM_FUSED_LAYERS)
)
