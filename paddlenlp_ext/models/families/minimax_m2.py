"""MiniMax M2: experts in every layer, chosen by sigmoid scores, and QK norms over all heads. MiniMax 2025.

The published config.json stores the number of rotated channels (`rotary_dim`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.stacked_experts import StackedExperts
from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, QK_NORMS, Architecture, Key
from paddlenlp_ext.checkpoint.gguf.moe_tensors import sigmoid_scores
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.families.olmo2 import OLMO2_TENSOR_PLAN
from paddlenlp_ext.models.moe_config import expert_differences
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family, require
from paddlenlp_ext.models.sliding_windows import full_attention
from paddlenlp_ext.nn.attention import QKNorm
from paddlenlp_ext.nn.experts import ExpertShape
from paddlenlp_ext.nn.routers import RouterOptions

_EXPERTS = "block_sparse_moe.experts.{}"
_FILES = StackedExperts(
    {
        "mlp.experts.gate_up_proj.weight": (f"{_EXPERTS}.w1.weight", f"{_EXPERTS}.w3.weight"),
        "mlp.experts.down_proj.weight": (f"{_EXPERTS}.w2.weight",),
    },
    {
        "mlp.gate.weight": "block_sparse_moe.gate.weight",
        "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
    },
)
_HEAD_DIM = 128


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    if config.get("rotary_dim") is None:
        return config
    head_dim = config.get("head_dim", _HEAD_DIM) or config["hidden_size"] / config["num_attention_heads"]
    return {"partial_rotary_factor": config["rotary_dim"] / head_dim, **config}


def _differences(config: ConfigReader) -> dict[str, Any]:
    require(config, "router_jitter_noise", None, 0.0)
    require(config, "scoring_func", None, "sigmoid")
    shape = ExpertShape(
        num_experts=config.size("num_local_experts"),
        intermediate_size=config.size("intermediate_size"),
        router=RouterOptions(
            kind="sigmoid", top_k=config.size("num_experts_per_tok"), normalizes=True, correction_dims=1
        ),
    )
    return {
        "qk_norm": QKNorm(per_head=False),
        "windows": full_attention(config),
        **expert_differences(config, OLMO2_TENSOR_PLAN, shape, file_layout=_FILES),
    }


FAMILIES.register("minimax_m2")(
    Family(
        "MiniMaxM2ForCausalLM",
        _differences,
        OLMO2_TENSOR_PLAN,
        {
            "head_dim": _HEAD_DIM,
            "max_position_embeddings": 196_608,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 8,
            "num_local_experts": 256,
            "partial_rotary_factor": 1.0,
            "rope_theta": 5_000_000.0,
            "router_aux_loss_coef": 0.001,
        },
        complete=_complete,
    )
)

ARCHITECTURES.register("minimax_m2")(
    Architecture(
        "minimax-m2",
        "MiniMaxM2ForCausalLM",
        {
            **PRE_NORM,
            **QK_NORMS,
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
            "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
        },
        keys={
            "num_local_experts": Key("expert_count"),
            "num_experts_per_tok": Key("expert_used_count"),
            "intermediate_size": Key("expert_feed_forward_length"),
        },
        settings=sigmoid_scores,
        has_experts=True,
        has_dense_layers=False,
        is_partly_rotated=True,
    )
)
