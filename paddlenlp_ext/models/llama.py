"""Llama 1 to 3.x and models with its layout (SmolLM2, TinyLlama, ...). Touvron et al. 2023, arXiv:2302.13971."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family, full_attention
from paddlenlp_ext.sharding_spec import TensorPlan

LLAMA_TENSOR_PLAN: TensorPlan = {
    "model.embed_tokens": "vocab",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "vocab",
}


def _differences(config: ConfigReader) -> dict[str, Any]:
    bias = bool(config.value("attention_bias"))
    return {"qkv_bias": bias, "output_bias": bias, "windows": full_attention(config)}


FAMILIES.register("llama")(Family("LlamaForCausalLM", _differences, LLAMA_TENSOR_PLAN))
