"""Qwen3.5 with experts: each token uses 8 of the 256 experts of a layer, and a gated shared expert. Qwen team 2026.

Files store the experts of a layer as two stacked tensors without `.weight`, or as separate tensors per expert. Saved
models have separate tensors, as in transformers.
"""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.stacked_experts import StackedExperts
from paddlenlp_ext.checkpoint.gguf.architecture import Key
from paddlenlp_ext.checkpoint.gguf.gated_delta_nets import delta_net_architecture
from paddlenlp_ext.checkpoint.gguf.moe_tensors import (
    EXPERT_KEYS,
    GATED_SHARED_EXPERT,
    ROUTED_EXPERTS,
    SQUEEZED_GATE,
    plain_softmax,
)
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.families.qwen3_5_text import (
    QWEN3_5_DEFAULTS,
    QWEN3_5_TENSOR_PLAN,
    complete_qwen3_5,
    qwen3_5_differences,
)
from paddlenlp_ext.models.moe_config import EXPERT_FILES, expert_differences
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family
from paddlenlp_ext.nn.experts import ExpertShape
from paddlenlp_ext.nn.routers import RouterOptions

_FILES = StackedExperts(EXPERT_FILES, {name: name.removesuffix(".weight") for name in EXPERT_FILES})


def gated_expert_shape(config: ConfigReader, normalizes: bool) -> ExpertShape:
    """Return the sizes of softmax-routed experts with a gated shared expert."""
    return ExpertShape(
        num_experts=config.size("num_experts"),
        intermediate_size=config.size("moe_intermediate_size"),
        router=RouterOptions(kind="softmax", top_k=config.size("num_experts_per_tok"), normalizes=normalizes),
        shared_size=config.size("shared_expert_intermediate_size"),
        shared_name="shared_expert",
        gates_shared=True,
    )


def _differences(config: ConfigReader) -> dict[str, Any]:
    shape = gated_expert_shape(config, normalizes=True)
    return {
        **qwen3_5_differences(config),
        **expert_differences(config, QWEN3_5_TENSOR_PLAN, shape, file_layout=_FILES),
    }


FAMILIES.register("qwen3_5_moe_text")(
    Family(
        "Qwen3_5MoeForCausalLM",
        _differences,
        QWEN3_5_TENSOR_PLAN,
        {
            **QWEN3_5_DEFAULTS,
            "intermediate_size": 512,  # unused: every layer has experts
            "moe_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 2,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 512,
        },
        complete=complete_qwen3_5,
    )
)

ARCHITECTURES.register("qwen3_5_moe_text")(
    delta_net_architecture(
        "qwen35moe",
        "Qwen3_5MoeForCausalLM",
        {**ROUTED_EXPERTS, **GATED_SHARED_EXPERT},
        {**EXPERT_KEYS, "shared_expert_intermediate_size": Key("expert_shared_feed_forward_length")},
        plain_softmax,
        has_experts=True,
        has_dense_layers=False,
        squeezed=SQUEEZED_GATE,
    )
)
