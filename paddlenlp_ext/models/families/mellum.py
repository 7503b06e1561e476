"""Mellum 2: Qwen3 with experts, sliding windows, and a separate RoPE for sliding windows. JetBrains 2026."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.stacked_experts import StackedExperts
from paddlenlp_ext.models.families.qwen3 import QWEN3_TENSOR_PLAN
from paddlenlp_ext.models.moe_config import EXPERT_FILES, expert_differences, sparse_by_type
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import windows_by_type
from paddlenlp_ext.nn.attention import QKNorm
from paddlenlp_ext.nn.experts import ExpertShape
from paddlenlp_ext.nn.routers import RouterOptions

_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
_FILES = StackedExperts(EXPERT_FILES, unused=r"mtp\..*")


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    layers = config["num_hidden_layers"]
    return {
        **config,
        "layer_types": config.get("layer_types") or ["full_attention"] * layers,
        "rope_parameters": config.get("rope_parameters") or _ROPES,
    }


def _differences(config: ConfigReader) -> dict[str, Any]:
    bias = bool(config.value("attention_bias"))
    shape = ExpertShape(
        num_experts=config.size("num_local_experts", default=config.value("num_experts")),
        intermediate_size=config.size("moe_intermediate_size"),
        router=RouterOptions(
            kind="softmax",
            top_k=config.size("num_experts_per_tok"),
            normalizes=bool(config.value("norm_topk_prob")),
        ),
    )
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "qk_norm": QKNorm(),
        "windows": windows_by_type(config, ()),
        **expert_differences(config, QWEN3_TENSOR_PLAN, shape, sparse_by_type(config), _FILES),
    }


FAMILIES.register("mellum")(
    Family(
        "MellumForCausalLM",
        _differences,
        QWEN3_TENSOR_PLAN,
        {
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 896,
            "norm_topk_prob": True,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 4,
            "router_aux_loss_coef": 0.001,
            "sliding_window": 1024,
        },
        complete=_complete,
        is_translated_by_peft=True,
    )
)
