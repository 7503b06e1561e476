"""DeepSeek V2: latent attention and experts, chosen within groups. DeepSeek-AI 2024, arXiv:2405.04434."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.models.latent import LATENT_DEFAULTS, complete_latent, latent_experts, require
from paddlenlp_ext.models.llama import LLAMA_TENSOR_PLAN
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family
from paddlenlp_ext.nn.routers import RouterOptions


def _differences(config: ConfigReader) -> dict[str, Any]:
    require(config, "scoring_func", None, "softmax")
    require(config, "topk_method", "greedy", "group_limited_greedy")
    require(config, "norm_topk_prob", None, False)
    first = config.value("first_k_dense_replace") or 0
    is_limited = config.value("topk_method") == "group_limited_greedy"
    router = RouterOptions(
        kind="softmax",
        top_k=config.size("num_experts_per_tok", default=6),  # transformers writes null for a model without experts
        normalizes=False,
        scale=float(config.value("routed_scaling_factor")),
        num_groups=config.size("n_group") if is_limited else 1,
        chosen_groups=config.size("topk_group") if is_limited else 1,
    )
    return latent_experts(config, router, lambda layer: layer >= first)


FAMILIES.register("deepseek_v2")(
    Family(
        "DeepseekV2ForCausalLM",
        _differences,
        LLAMA_TENSOR_PLAN,
        {
            **LATENT_DEFAULTS,
            "first_k_dense_replace": 0,
            "moe_intermediate_size": 1407,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
        },
        complete=complete_latent,
    )
)
