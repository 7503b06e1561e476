"""Qwen3-Next: like Qwen3.5 with experts, with fused projections of the gated delta nets. Qwen team 2025."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.models.families.qwen3 import QWEN3_TENSOR_PLAN
from paddlenlp_ext.models.families.qwen3_5_moe_text import gated_expert_shape
from paddlenlp_ext.models.families.qwen3_5_text import QWEN3_5_DEFAULTS, complete_qwen3_5, qwen3_5_differences
from paddlenlp_ext.models.moe_config import expert_differences, sparse_by_step
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family
from paddlenlp_ext.nn.gated_delta_net import FusedGatedDeltaShape
from paddlenlp_ext.sharding_spec import TensorPlan

_TENSOR_PLAN: TensorPlan = {
    **QWEN3_TENSOR_PLAN,
    "model.layers.*.linear_attn.in_proj_qkvz": "colwise",
    "model.layers.*.linear_attn.in_proj_ba": "colwise",
    "model.layers.*.linear_attn.conv1d": "replicated",
    "model.layers.*.linear_attn.norm": "replicated",
    "model.layers.*.linear_attn.out_proj": "rowwise",
}


def _differences(config: ConfigReader) -> dict[str, Any]:
    shape = gated_expert_shape(config, normalizes=bool(config.value("norm_topk_prob")))
    return {
        **qwen3_5_differences(config, FusedGatedDeltaShape),
        **expert_differences(config, _TENSOR_PLAN, shape, sparse_by_step(config)),
    }


FAMILIES.register("qwen3_next")(
    Family(
        "Qwen3NextForCausalLM",
        _differences,
        _TENSOR_PLAN,
        {
            **QWEN3_5_DEFAULTS,
            "intermediate_size": 5632,
            "moe_intermediate_size": 512,
            "norm_topk_prob": True,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "num_key_value_heads": 2,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 512,
        },
        complete=complete_qwen3_5,
        is_translated_by_peft=True,
    )
)
