"""GLM-4.5: experts chosen by sigmoid scores, and a shared one. Zhipu AI 2025, arXiv:2508.06471."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.file_layout import StackedExperts
from paddlenlp_ext.models.expert_layers import EXPERT_FILES, expert_differences
from paddlenlp_ext.models.llama import LLAMA_TENSOR_PLAN
from paddlenlp_ext.models.qwen3 import QWEN3_TENSOR_PLAN
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family, full_attention
from paddlenlp_ext.nn.attention import QKNorm
from paddlenlp_ext.nn.experts import ExpertShape
from paddlenlp_ext.nn.routers import RouterOptions


def _differences(config: ConfigReader) -> dict[str, Any]:
    has_qk_norm, num_layers = bool(config.value("use_qk_norm")), config.size("num_hidden_layers")
    inner, dense = config.size("moe_intermediate_size"), config.value("first_k_dense_replace")
    shape = ExpertShape(
        num_experts=config.size("n_routed_experts"),
        intermediate_size=inner,
        router=RouterOptions(
            kind="sigmoid",
            top_k=config.size("num_experts_per_tok"),
            normalizes=bool(config.value("norm_topk_prob")),
            scale=float(config.value("routed_scaling_factor")),
            num_groups=config.size("n_group"),
            chosen_groups=config.size("topk_group"),
            group_score="top2",
            correction_dims=1,
        ),
        shared_size=inner * config.size("n_shared_experts"),
    )
    files = StackedExperts(EXPERT_FILES, unused=rf"model\.layers\.{num_layers}\..*")  # it predicts further tokens
    return {
        "qkv_bias": bool(config.value("attention_bias")),
        "qk_norm": QKNorm() if has_qk_norm else None,
        "windows": full_attention(config),
        **expert_differences(
            config,
            QWEN3_TENSOR_PLAN if has_qk_norm else LLAMA_TENSOR_PLAN,
            shape,
            lambda layer: layer >= dense,
            files,
        ),
    }


FAMILIES.register("glm4_moe")(
    Family(
        "Glm4MoeForCausalLM",
        _differences,
        LLAMA_TENSOR_PLAN,
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
    )
)
