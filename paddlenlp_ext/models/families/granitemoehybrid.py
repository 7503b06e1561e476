"""Granite 4: Granite with a fused feed-forward; Mamba-2 in most layers and experts in some models. IBM 2025.

Models with "h" in the name have Mamba-2 layers: H-350M, H-1B and H-Micro without experts, H-Tiny and H-Small with
experts beside the feed-forward. Attention layers have RoPE in some of the models without Mamba-2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.renamed_tensors import RenamedTensors
from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, Architecture, Key, attention_bias, count
from paddlenlp_ext.checkpoint.gguf.fused_gates import FEED_FORWARD, join_gates, split_gates, with_experts
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.mamba_tensors import with_mamba
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.families.granite import GRANITE_KEYS, GRANITE_MULTIPLIERS, HYBRID_KEY, granite_differences
from paddlenlp_ext.models.mamba_config import MAMBA_DEFAULTS, MAMBA_TENSOR_PLAN, layer_types_with_mamba, mamba_mixers
from paddlenlp_ext.models.moe_config import expert_differences
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.nn.experts import ExpertShape
from paddlenlp_ext.nn.routers import RouterOptions

_LAYER = "model.layers.*"
_FILES = RenamedTensors(
    {
        f"{_LAYER}.mlp": f"{_LAYER}.shared_mlp",
        f"{_LAYER}.mlp.down_proj": f"{_LAYER}.shared_mlp.output_linear",
        f"{_LAYER}.moe": f"{_LAYER}.block_sparse_moe",
        f"{_LAYER}.moe.gate": f"{_LAYER}.block_sparse_moe.router",
    },
    in_adapters=True,
    tensors={
        f"{_LAYER}.moe.experts.gate_up_proj.weight": f"{_LAYER}.block_sparse_moe.input_linear.weight",
        f"{_LAYER}.moe.experts.down_proj.weight": f"{_LAYER}.block_sparse_moe.output_linear.weight",
        f"{_LAYER}.moe.gate.weight": f"{_LAYER}.block_sparse_moe.router.layer.weight",
    },
)
_HAS_ROPE, _EXPERT_SIZE, _DEFAULT_SIZE = "has_rope", "moe_intermediate_size", 11008
"""Keys that `_complete` adds: presence of RoPE, which GGUF files store, and an expert's size; the default size."""


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        **config,
        "layer_types": layer_types_with_mamba(config),
        _EXPERT_SIZE: config.get("intermediate_size", _DEFAULT_SIZE),
        "intermediate_size": config.get("shared_intermediate_size") or 1024,
        _HAS_ROPE: config.get("position_embedding_type") == "rope",
    }


def _differences(config: ConfigReader) -> dict[str, Any]:
    mixers = mamba_mixers(config)
    plan = DECODER_TENSOR_PLAN if mixers is None else {**DECODER_TENSOR_PLAN, **MAMBA_TENSOR_PLAN}
    differences = {
        **granite_differences(config),
        "mixers": mixers,
        "rotates": (bool(config.value(_HAS_ROPE)),) * config.size("num_hidden_layers"),
        "tensor_plan": plan,
        "file_layout": _FILES,
    }
    if config.value("num_local_experts"):
        shape = ExpertShape(
            num_experts=config.size("num_local_experts"),
            intermediate_size=config.size(_EXPERT_SIZE),
            router=RouterOptions(kind="softmax_of_chosen", top_k=config.size("num_experts_per_tok")),
            shared_size=config.size("intermediate_size"),
            shared_name=None,
        )
        differences |= {**expert_differences(config, plan, shape, file_layout=_FILES), "layer": "expert_pre_norm"}
    return differences


FAMILIES.register("granitemoehybrid")(
    Family(
        "GraniteMoeHybridForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {
            **GRANITE_MULTIPLIERS,
            **MAMBA_DEFAULTS,
            "intermediate_size": _DEFAULT_SIZE,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "router_aux_loss_coef": 0.001,
        },
        complete=_complete,
        fused_layers={"input_linear": ("gate_proj", "up_proj")},
    )
)


def _gguf_settings(file: GgufFile) -> dict[str, Any]:
    width = count(file, "feed_forward_length")
    return {
        **attention_bias(file),
        "layer_types": ["attention"] * count(file, "block_count"),
        "position_embedding_type": "rope" if file.get(file.architecture_key(HYBRID_KEY), bool, True) else None,
        "shared_intermediate_size": count(file, "expert_shared_feed_forward_length", width),
    }


_GGUF = Architecture(
    "granite",  # the converter of llama.cpp writes models without Mamba layers as granite
    "GraniteMoeHybridForCausalLM",
    {**PRE_NORM, **FEED_FORWARD},
    keys={**GRANITE_KEYS, _HAS_ROPE: Key(HYBRID_KEY, bool)},
    constants={"num_local_experts": 0},
    settings=_gguf_settings,
    reads=lambda file: file.architecture_key(HYBRID_KEY) in file.metadata,
    permutes=True,
    restore=join_gates,
    split=split_gates,
)
_GGUF_EXPERTS = with_experts(_GGUF, "granitemoe")
_WITH_MAMBA = [with_mamba(layout, "granitehybrid") for layout in (_GGUF_EXPERTS, _GGUF)]
ARCHITECTURES.register("granitemoehybrid")(replace(_GGUF, variants=(*_WITH_MAMBA, _GGUF_EXPERTS)))
