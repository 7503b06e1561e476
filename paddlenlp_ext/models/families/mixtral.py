"""Mixtral: Mistral with experts in every layer. Jiang et al. 2024, arXiv:2401.04088."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.stacked_experts import StackedExperts
from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, Architecture, Key
from paddlenlp_ext.checkpoint.gguf.moe_tensors import plain_softmax
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.moe_config import expert_differences
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.nn.experts import ExpertShape
from paddlenlp_ext.nn.routers import RouterOptions

_FILES = StackedExperts(
    {
        "mlp.experts.gate_up_proj.weight": (
            "block_sparse_moe.experts.{}.w1.weight",
            "block_sparse_moe.experts.{}.w3.weight",
        ),
        "mlp.experts.down_proj.weight": ("block_sparse_moe.experts.{}.w2.weight",),
    },
    {"mlp.gate.weight": "block_sparse_moe.gate.weight"},
)


def _differences(config: ConfigReader) -> dict[str, Any]:
    window = None if config.value("sliding_window") is None else config.size("sliding_window")
    if config.value("router_jitter_noise"):
        raise ValueError(
            "router_jitter_noise in config.json: noise on the routers' inputs is not supported; set it to 0"
        )
    shape = ExpertShape(
        num_experts=config.size("num_local_experts"),
        intermediate_size=config.size("intermediate_size"),
        router=RouterOptions(kind="softmax", top_k=config.size("num_experts_per_tok")),
    )
    return {
        "windows": (window,) * config.size("num_hidden_layers"),
        **expert_differences(config, DECODER_TENSOR_PLAN, shape, file_layout=_FILES),
    }


FAMILIES.register("mixtral")(
    Family(
        "MixtralForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "router_aux_loss_coef": 0.001,
        },
    )
)

ARCHITECTURES.register("mixtral")(
    Architecture(
        "llama",
        "MixtralForCausalLM",
        {
            **PRE_NORM,
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        },
        keys={"num_local_experts": Key("expert_count"), "num_experts_per_tok": Key("expert_used_count")},
        settings=plain_softmax,
        has_experts=True,
        permutes=True,
        has_window=True,
    )
)
