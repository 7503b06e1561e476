"""GLM-4.7-Flash: latent attention and experts of DeepSeek V3. Zhipu AI 2025, GLM-4.5, arXiv:2508.06471."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.families.deepseek_v3 import DEEPSEEK_V3_GGUF, sigmoid_experts
from paddlenlp_ext.models.latent_attention_config import complete_latent
from paddlenlp_ext.models.moe_config import sparse_by_type
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add DeepSeek's key `first_k_dense_replace`, the number of dense layers before the first layer with experts."""
    types = config.get("mlp_layer_types") or ["dense"]
    return {**complete_latent(config), "first_k_dense_replace": types.count("dense")}


def _differences(config: ConfigReader) -> dict[str, Any]:
    return sigmoid_experts(config, sparse_by_type(config, num_dense=1))


FAMILIES.register("glm4_moe_lite")(
    Family(
        "Glm4MoeLiteForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "max_position_embeddings": 202752,
            "moe_intermediate_size": 1536,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 4,
            "rms_norm_eps": 1e-5,
            "rope_interleave": True,
            "routed_scaling_factor": 1.8,
            "topk_group": 1,
        },
        complete=_complete,
        is_translated_by_peft=True,
    )
)

# GGUF files of GLM-4.7-Flash have the architecture deepseek2, and are read as DeepSeek V3 (same computation).
ARCHITECTURES.register("glm4_moe_lite")(replace(DEEPSEEK_V3_GGUF, reads=lambda file: False))
