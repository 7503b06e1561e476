"""Qwen3 with experts: each token uses 8 of the 128 experts of a layer. Yang et al. 2025, arXiv:2505.09388.

The number of experts is stored in config.json as `num_experts`, or as `num_local_experts` by newer versions of the
transformers library.
"""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, QK_NORMS, Architecture, Key, attention_bias
from paddlenlp_ext.checkpoint.gguf.moe_tensors import EXPERT_KEYS, ROUTED_EXPERTS, plain_softmax
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.families.qwen3 import QWEN3_TENSOR_PLAN
from paddlenlp_ext.models.moe_config import expert_differences, sparse_by_step
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family
from paddlenlp_ext.nn.attention import QKNorm
from paddlenlp_ext.nn.experts import ExpertShape
from paddlenlp_ext.nn.routers import RouterOptions


def _differences(config: ConfigReader) -> dict[str, Any]:
    bias = bool(config.value("attention_bias"))
    window = config.size("sliding_window") if config.value("use_sliding_window") else None
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
        "windows": (window,) * config.size("num_hidden_layers"),
        **expert_differences(config, QWEN3_TENSOR_PLAN, shape, sparse_by_step(config)),
    }


FAMILIES.register("qwen3_moe")(
    Family(
        "Qwen3MoeForCausalLM",
        _differences,
        QWEN3_TENSOR_PLAN,
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "router_aux_loss_coef": 0.001,
        },
        is_translated_by_peft=True,
    )
)

ARCHITECTURES.register("qwen3_moe")(
    Architecture(
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        {**PRE_NORM, **ROUTED_EXPERTS, **QK_NORMS},
        keys={
            **EXPERT_KEYS,
            "norm_topk_prob": Key("expert_weights_norm", bool, default=True),
        },
        settings=lambda file: {**plain_softmax(file), **attention_bias(file)},
        has_experts=True,
    )
)
