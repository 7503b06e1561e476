"""Granite 4: Granite with a fused feed-forward; Mamba-2 in most layers and experts in some models. IBM 2025.

Models with "h" in the name have Mamba-2 layers: H-350M, H-1B and H-Micro without experts, H-Tiny and H-Small with
experts beside the feed-forward. Attention layers have RoPE in some of the models without Mamba-2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.renamed_tensors import RenamedTensors
from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, Architecture, Key, attention_bias
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.joined_rows import JoinedRows, split_rows
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.families.granite import (
    GRANITE_KEYS,
    GRANITE_MULTIPLIERS,
    HYBRID_KEY,
    granite_differences,
)
from paddlenlp_ext.models.moe_config import expert_differences
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.nn.experts import ExpertShape
from paddlenlp_ext.nn.mamba2 import Mamba2Shape
from paddlenlp_ext.nn.routers import RouterOptions
from paddlenlp_ext.sharding_spec import TensorPlan

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
_FUSED = {"input_linear": ("gate_proj", "up_proj")}
_MAMBA_PLAN: TensorPlan = {f"{_LAYER}.mamba.{name}": "replicated" for name in ("in_proj", "conv1d", "norm", "out_proj")}
_MAMBA, _ATTENTION = "linear_attention", "full_attention"
_TYPES = {"mamba": _MAMBA, "attention": _ATTENTION}
"""Layer types of the published models -> layer types of transformers 5."""
_HAS_ROPE, _EXPERT_SIZE = "has_rope", "moe_intermediate_size"
"""Keys of completed configs: presence of RoPE, which GGUF files store, and intermediate size of an expert."""


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    types = config.get("layer_types") or [_MAMBA] * config["num_hidden_layers"]
    return {
        **config,
        "layer_types": [_TYPES.get(kind, kind) for kind in types],
        _EXPERT_SIZE: config["intermediate_size"],
        "intermediate_size": config.get("shared_intermediate_size") or 1024,
        _HAS_ROPE: config.get("position_embedding_type") == "rope",
    }


def _differences(config: ConfigReader) -> dict[str, Any]:
    """Return the differences from the common decoder.

    Raises:
        ValueError: `layer_types` has an unknown entry, or its length is not the number of layers; see `_mamba_shape`.
    """
    layers, types = config.size("num_hidden_layers"), config.value("layer_types")
    if {*types} - {_MAMBA, _ATTENTION} or len(types) != layers:
        raise ValueError(
            f"layer_types in config.json must be mamba or attention for each of the {layers} layers, got {len(types)} "
            f"entries: {', '.join(sorted({*types}))}"
        )
    shape = _mamba_shape(config) if _MAMBA in types else None
    plan = DECODER_TENSOR_PLAN if shape is None else {**DECODER_TENSOR_PLAN, **_MAMBA_PLAN}
    return {
        **granite_differences(config),
        "mixers": None if shape is None else tuple(shape if kind == _MAMBA else None for kind in types),
        "rotates": (bool(config.value(_HAS_ROPE)),) * layers,
        "tensor_plan": plan,
        "file_layout": _FILES,
        **(_experts(config, plan) if config.value("num_local_experts") else {}),
    }


def _experts(config: ConfigReader, plan: TensorPlan) -> dict[str, Any]:
    shape = ExpertShape(
        num_experts=config.size("num_local_experts"),
        intermediate_size=config.size(_EXPERT_SIZE),
        router=RouterOptions(kind="softmax_of_chosen", top_k=config.size("num_experts_per_tok")),
        shared_size=config.size("intermediate_size"),
        shared_name=None,
    )
    return {**expert_differences(config, plan, shape, file_layout=_FILES), "layer": "expert_pre_norm"}


def _mamba_shape(config: ConfigReader) -> Mamba2Shape:
    """Return the sizes of the Mamba-2 layers.

    Raises:
        ValueError: the counts of heads, groups and channels do not match, or `time_step_limit` is not an interval.
    """
    heads, groups = config.size("mamba_n_heads"), config.size("mamba_n_groups")
    inner, head_dim = config.size("mamba_expand") * config.size("hidden_size"), config.value("mamba_d_head")
    head_dim = inner // heads if head_dim in (None, "auto") else config.size("mamba_d_head")
    if heads * head_dim != inner or heads % groups:
        raise ValueError(
            f"config.json: mamba_n_heads {heads} heads with {head_dim} channels must have mamba_expand * hidden_size = "
            f"{inner} channels, and mamba_n_groups {groups} must divide the number of heads"
        )
    limits = config.value("time_step_limit") or (0.0, math.inf)
    numbers = [float(limit["__float__"] if isinstance(limit, Mapping) else limit) for limit in limits]
    if len(numbers) != 2 or numbers[0] > numbers[1]:
        raise ValueError(f"time_step_limit {limits} in config.json must be a smallest and a largest step size")
    return Mamba2Shape(
        hidden_size=config.size("hidden_size"),
        num_heads=heads,
        num_groups=groups,
        head_dim=head_dim,
        state_dim=config.size("mamba_d_state"),
        num_taps=config.size("mamba_d_conv"),
        conv_bias=bool(config.value("mamba_conv_bias")),
        bias=bool(config.value("mamba_proj_bias")),
        step_limits=(numbers[0], numbers[1]),
        norm_epsilon=float(config.value("rms_norm_eps")),
    )


FAMILIES.register("granitemoehybrid")(
    Family(
        "GraniteMoeHybridForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {
            **GRANITE_MULTIPLIERS,
            "intermediate_size": 11008,
            "mamba_conv_bias": True,
            "mamba_d_conv": 4,
            "mamba_d_state": 256,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
            "mamba_n_heads": 128,
            "mamba_proj_bias": False,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "router_aux_loss_coef": 0.001,
        },
        complete=_complete,
        fused_layers=_FUSED,
    )
)


def _gguf_settings(file: GgufFile) -> dict[str, Any]:
    has_rope = file.get(file.architecture_key(HYBRID_KEY), bool, True)
    return {
        **attention_bias(file),
        "layer_types": ["attention"] * file.require(file.architecture_key("block_count"), int),
        "num_local_experts": 0,
        "position_embedding_type": "rope" if has_rope else None,
        "shared_intermediate_size": file.require(file.architecture_key("feed_forward_length"), int),
    }


_ROWS = {"shared_mlp.input_linear": ("shared_mlp.gate_proj", "shared_mlp.up_proj")}

ARCHITECTURES.register("granitemoehybrid")(
    Architecture(
        "granite",  # the converter of llama.cpp writes models without Mamba layers as granite
        "GraniteMoeHybridForCausalLM",
        PRE_NORM,
        keys={**GRANITE_KEYS, _HAS_ROPE: Key(HYBRID_KEY, bool)},
        settings=_gguf_settings,
        reads=lambda file: file.architecture_key(HYBRID_KEY) in file.metadata,
        permutes=True,
        restore=lambda source: JoinedRows(_FILES.stored(source), _ROWS),
        split=lambda tensors, config: {
            _FILES.name_in_memory(name): tensor for name, tensor in split_rows(tensors, _ROWS).items()
        },
    )
)
