"""GLM-4.5: experts chosen by sigmoid scores, and a shared expert. Zhipu AI 2025, arXiv:2508.06471."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, QK_NORMS, Architecture, has_bias
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.moe_tensors import (
    GROUPED_EXPERT_KEYS,
    ROUTED_EXPERTS,
    SHARED_EXPERTS,
    sigmoid_scores,
)
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.families.qwen3 import QWEN3_TENSOR_PLAN
from paddlenlp_ext.models.moe_config import routed_expert_differences, sigmoid_router
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import full_attention
from paddlenlp_ext.nn.attention import QKNorm


def _differences(config: ConfigReader) -> dict[str, Any]:
    has_qk_norm, dense = bool(config.value("use_qk_norm")), config.value("first_k_dense_replace")
    plan = QWEN3_TENSOR_PLAN if has_qk_norm else DECODER_TENSOR_PLAN
    return {
        "qkv_bias": bool(config.value("attention_bias")),
        "qk_norm": QKNorm() if has_qk_norm else None,
        "windows": full_attention(config),
        **routed_expert_differences(config, plan, sigmoid_router(config), lambda layer: layer >= dense),
    }


FAMILIES.register("glm4_moe")(
    Family(
        "Glm4MoeForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        is_translated_by_peft=True,
    )
)


def _gguf_settings(file: GgufFile) -> dict[str, Any]:
    """Return `attention_bias` and `use_qk_norm` for config.json, from the tensors of a GGUF file.

    Raises:
        ValueError: the routers do not compute sigmoid scores.
    """
    return {
        **sigmoid_scores(file),
        "attention_bias": has_bias(file, "attn_q"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


ARCHITECTURES.register("glm4_moe")(
    Architecture(
        "glm4moe",
        "Glm4MoeForCausalLM",
        {
            **PRE_NORM,
            **ROUTED_EXPERTS,
            **SHARED_EXPERTS,
            **QK_NORMS,
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
        keys=GROUPED_EXPERT_KEYS,
        settings=_gguf_settings,
        has_experts=True,
        is_partly_rotated=True,
    )
)
