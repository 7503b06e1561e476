"""LFM2 with experts, which are chosen by sigmoid scores. Liquid AI 2025, arXiv:2511.23404."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.renamed_experts import RenamedExperts
from paddlenlp_ext.checkpoint.file_layouts.stacked_experts import StackedExperts
from paddlenlp_ext.checkpoint.gguf.architecture import Key
from paddlenlp_ext.checkpoint.gguf.moe_tensors import EXPERT_KEYS, sigmoid_scores
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.checkpoint.gguf.short_convolutions import convolution_architecture
from paddlenlp_ext.models.families.lfm2 import (
    LFM2_DEFAULTS,
    LFM2_FILES,
    LFM2_TENSOR_PLAN,
    complete_lfm2,
    lfm2_differences,
)
from paddlenlp_ext.models.moe_config import expert_differences
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family
from paddlenlp_ext.nn.experts import ExpertShape
from paddlenlp_ext.nn.routers import RouterOptions

_FILES = RenamedExperts(
    LFM2_FILES,
    StackedExperts(
        {
            "mlp.experts.gate_up_proj.weight": ("mlp.experts.{}.w1.weight", "mlp.experts.{}.w3.weight"),
            "mlp.experts.down_proj.weight": ("mlp.experts.{}.w2.weight",),
        },
        {"mlp.gate.e_score_correction_bias": "mlp.expert_bias"},
    ),
)


def _differences(config: ConfigReader) -> dict[str, Any]:
    dense = config.value("num_dense_layers") or 0
    shape = ExpertShape(
        num_experts=config.size("num_experts"),
        intermediate_size=config.size("moe_intermediate_size"),
        router=RouterOptions(
            kind="sigmoid",
            top_k=config.size("num_experts_per_tok"),
            normalizes=bool(config.value("norm_topk_prob")),
            sum_offset=1e-6,
            scale=float(config.value("routed_scaling_factor")),
            correction_dims=1 if config.value("use_expert_bias") else 0,
        ),
    )
    return {
        **lfm2_differences(config),
        **expert_differences(config, LFM2_TENSOR_PLAN, shape, lambda layer: layer >= dense, _FILES),
    }


FAMILIES.register("lfm2_moe")(
    Family(
        "Lfm2MoeForCausalLM",
        _differences,
        LFM2_TENSOR_PLAN,
        {
            **LFM2_DEFAULTS,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.0,
            "use_expert_bias": True,
        },
        complete=complete_lfm2,
        fused_layers={"in_proj": ("b_proj", "c_proj", "u_proj")},
    )
)

ARCHITECTURES.register("lfm2_moe")(
    convolution_architecture(
        "lfm2moe",
        "Lfm2MoeForCausalLM",
        {
            "ffn_gate_inp": "feed_forward.gate",
            "ffn_gate_exps": "feed_forward.experts.{}.w1",
            "ffn_up_exps": "feed_forward.experts.{}.w3",
            "ffn_down_exps": "feed_forward.experts.{}.w2",
            "exp_probs_b.bias": "feed_forward.expert_bias",
        },
        keys={**EXPERT_KEYS, "num_dense_layers": Key("leading_dense_block_count", default=0, minimum=0)},
        settings=sigmoid_scores,
        has_experts=True,
    )
)
