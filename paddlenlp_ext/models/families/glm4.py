"""GLM-4-0414: GLM-4-9B with norms before and after attention and feed-forward. Zhipu AI 2025."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, Architecture, has_bias
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.families.glm import GLM_DEFAULTS, GLM_FUSED_LAYERS, glm_differences
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family

_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def _differences(config: ConfigReader) -> dict[str, Any]:
    return {**glm_differences(config), "layer": "sandwich", "sandwich_norms": _NORMS}


FAMILIES.register("glm4")(
    Family("Glm4ForCausalLM", _differences, DECODER_TENSOR_PLAN, GLM_DEFAULTS, fused_layers=GLM_FUSED_LAYERS)
)

ARCHITECTURES.register("glm4")(
    Architecture(
        "glm4",
        "Glm4ForCausalLM",
        {
            **PRE_NORM,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        settings=lambda file: {"attention_bias": has_bias(file, "attn_q")},
        is_partly_rotated=True,
    )
)
