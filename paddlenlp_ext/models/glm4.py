"""GLM-4-0414: GLM-4-9B with norms before and after attention and feed-forward. Zhipu AI 2025."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.models.glm import GLM_DEFAULTS, GLM_FUSED_LAYERS, glm_differences
from paddlenlp_ext.models.llama import LLAMA_TENSOR_PLAN
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family

_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def _differences(config: ConfigReader) -> dict[str, Any]:
    return {**glm_differences(config), "layer": "sandwich", "sandwich_norms": _NORMS}


FAMILIES.register("glm4")(
    Family("Glm4ForCausalLM", _differences, LLAMA_TENSOR_PLAN, GLM_DEFAULTS, fused_layers=GLM_FUSED_LAYERS)
)
