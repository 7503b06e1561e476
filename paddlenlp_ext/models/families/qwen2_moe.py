"""Qwen1.5 and Qwen2 with routed experts and a gated shared expert. Yang et al. 2024, arXiv:2407.10671."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, Architecture, Key, has_bias
from paddlenlp_ext.checkpoint.gguf.moe_tensors import (
    EXPERT_KEYS,
    GATED_SHARED_EXPERT,
    ROUTED_EXPERTS,
    SQUEEZED_GATE,
    plain_softmax,
)
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.moe_config import expert_differences, sparse_by_step
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import full_attention, window_layers, windows_by_type
from paddlenlp_ext.nn.experts import ExpertShape
from paddlenlp_ext.nn.routers import RouterOptions


def _differences(config: ConfigReader) -> dict[str, Any]:
    shape = ExpertShape(
        num_experts=config.size("num_experts"),
        intermediate_size=config.size("moe_intermediate_size"),
        router=RouterOptions(
            kind="softmax",
            top_k=config.size("num_experts_per_tok"),
            normalizes=bool(config.value("norm_topk_prob")),
        ),
        shared_size=config.size("shared_expert_intermediate_size"),
        shared_name="shared_expert",
        gates_shared=True,
    )
    return {
        "qkv_bias": bool(config.value("qkv_bias")),
        "windows": _windows(config),
        **expert_differences(config, DECODER_TENSOR_PLAN, shape, sparse_by_step(config)),
    }


def _windows(config: ConfigReader) -> tuple[int | None, ...]:
    """Return the sliding window of each layer; None for full attention.

    Without `use_sliding_window`, no layer has a window. Without `layer_types`, layers with an even index below
    `max_window_layers` have a window.
    """
    if not config.value("use_sliding_window"):
        return full_attention(config)
    last = window_layers(config)
    layers = range(config.size("num_hidden_layers"))
    return windows_by_type(
        config, ["sliding_attention" if layer % 2 == 0 and layer < last else "full_attention" for layer in layers]
    )


FAMILIES.register("qwen2_moe")(
    Family(
        "Qwen2MoeForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {
            "max_position_embeddings": 32768,
            "qkv_bias": True,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "router_aux_loss_coef": 0.001,
        },
    )
)

ARCHITECTURES.register("qwen2_moe")(
    Architecture(
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        {**PRE_NORM, **ROUTED_EXPERTS, **GATED_SHARED_EXPERT},
        keys={
            **EXPERT_KEYS,
            "shared_expert_intermediate_size": Key("expert_shared_feed_forward_length"),
            "norm_topk_prob": Key("expert_weights_norm", bool, default=False),
        },
        settings=lambda file: {**plain_softmax(file), "qkv_bias": has_bias(file, "attn_q")},
        has_experts=True,
        squeezed=SQUEEZED_GATE,
    )
)
