"""DeepSeek V3 and R1: DeepSeek V2 with sigmoid routers and interleaved RoPE. DeepSeek-AI 2024, arXiv:2412.19437."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paddlenlp_ext.checkpoint.gguf.mla_tensors import latent_settings
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.families.deepseek_v2 import DEEPSEEK_GGUF, has_sigmoid_router, latent_experts
from paddlenlp_ext.models.latent_attention_config import LATENT_DEFAULTS, complete_latent
from paddlenlp_ext.models.moe_config import sigmoid_router
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family, require


def sigmoid_experts(config: ConfigReader, is_sparse: Callable[[int], bool]) -> dict[str, Any]:
    """Return the `DecoderConfig` attributes of a model with the attention and the router of DeepSeek V3.

    Raises:
        ValueError: the config selects another kind of router.
    """
    require(config, "scoring_func", None, "sigmoid")
    require(config, "topk_method", None, "noaux_tc")
    return latent_experts(
        config, sigmoid_router(config), is_sparse, interleaved_rope=bool(config.value("rope_interleave"))
    )


def _differences(config: ConfigReader) -> dict[str, Any]:
    first = config.value("first_k_dense_replace") or 0
    return sigmoid_experts(config, lambda layer: layer >= first)


FAMILIES.register("deepseek_v3")(
    Family(
        "DeepseekV3ForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {
            **LATENT_DEFAULTS,
            "first_k_dense_replace": 3,
            "max_position_embeddings": 4096,
            "moe_intermediate_size": 2048,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "rope_interleave": True,
            "routed_scaling_factor": 2.5,
            "topk_group": 4,
        },
        complete=complete_latent,
        is_translated_by_peft=True,
    )
)

DEEPSEEK_V3_GGUF = replace(
    DEEPSEEK_GGUF, class_name="DeepseekV3ForCausalLM", settings=latent_settings, reads=has_sigmoid_router
)
ARCHITECTURES.register("deepseek_v3")(DEEPSEEK_V3_GGUF)
