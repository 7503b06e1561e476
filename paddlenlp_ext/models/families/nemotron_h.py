"""Nemotron H and 3: each layer is Mamba-2, attention, a feed-forward or experts. NVIDIA 2025, arXiv:2504.03624.

Feed-forwards and experts have squared ReLU without a gate. Attention has no RoPE and no biases. The experts of Nemotron
3 Super and Ultra work on latents. In files, all blocks are named `mixer`. Multi-token-prediction (MTP) layers are not
read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.renamed_experts import RenamedExperts
from paddlenlp_ext.checkpoint.file_layouts.renamed_tensors import RenamedTensors
from paddlenlp_ext.checkpoint.file_layouts.stacked_experts import StackedExperts
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.checkpoint.gguf.single_blocks import single_block_architecture
from paddlenlp_ext.models.moe_config import expert_differences, sigmoid_router
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family, require
from paddlenlp_ext.models.single_block_config import SPARSE, block_kinds, single_block_differences
from paddlenlp_ext.models.sliding_windows import full_attention
from paddlenlp_ext.nn.experts import ExpertShape
from paddlenlp_ext.nn.mamba2 import Mamba2Shape

_LAYER, _MIXER = "model.layers.*", "model.layers.*.mixer"
_BLOCKS = {
    "mamba": ("in_proj", "conv1d", "norm", "out_proj"),
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("up_proj", "down_proj", "gate", "experts", "shared_experts", "fc1_latent_proj", "fc2_latent_proj"),
}
_LAYER_NAMES = {"model.embed_tokens": "model.embeddings"}
_LAYER_NAMES |= {f"{_LAYER}.{own}.{part}": f"{_MIXER}.{part}" for own, parts in _BLOCKS.items() for part in parts}
_TENSOR_NAMES = {"model.norm.weight": "model.norm_f.weight"}
_TENSOR_NAMES |= {f"{_LAYER}.mamba.{name}": f"{_MIXER}.{name}" for name in ("A_log", "D", "dt_bias")}
_FILES = RenamedExperts(
    RenamedTensors(_LAYER_NAMES, in_adapters=True, tensors=_TENSOR_NAMES),
    StackedExperts(
        {f"mlp.experts.{part}.weight": (f"mlp.experts.{{}}.{part}.weight",) for part in ("up_proj", "down_proj")},
        unused=r"mtp\..*",
    ),
    prefixes=RenamedTensors({"model": "backbone"}),
)


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    kinds = block_kinds(config.get("layers_block_type") or config.get("hybrid_override_pattern") or "ME*-")
    epsilon = config.get("layer_norm_epsilon", 1e-5)
    return {**config, "layers_block_type": kinds, "num_hidden_layers": len(kinds), "rms_norm_eps": epsilon}


def _mamba_shape(config: ConfigReader) -> Mamba2Shape:
    return Mamba2Shape(
        hidden_size=config.size("hidden_size"),
        num_heads=config.size("mamba_num_heads"),
        num_groups=config.size("n_groups"),
        head_dim=config.size("mamba_head_dim"),
        state_dim=config.size("ssm_state_size"),
        num_taps=config.size("conv_kernel"),
        conv_bias=bool(config.value("use_conv_bias")),
        bias=bool(config.value("use_bias")),
        step_limits=(float(config.value("time_step_min")), math.inf),
        norm_epsilon=float(config.value("rms_norm_eps")),
    )


def _differences(config: ConfigReader) -> dict[str, Any]:
    require(config, "mlp_hidden_act", "relu2")
    require(config, "mamba_hidden_act", None, "silu")
    require(config, "mlp_bias", None, False)
    kinds = config.value("layers_block_type")
    blocks = single_block_differences(config, kinds, _mamba_shape(config))
    common = {"rotates": (False,) * len(kinds), "windows": full_attention(config), "file_layout": _FILES}
    if SPARSE not in kinds:
        return {**blocks, **common}
    shape = ExpertShape(
        num_experts=config.size("n_routed_experts"),
        intermediate_size=config.size("moe_intermediate_size"),
        router=sigmoid_router(config),
        shared_size=config.size("moe_shared_expert_intermediate_size"),
        latent_size=config.value("moe_latent_size") or 0,
        gated=False,
        activation="relu2",
    )
    experts = expert_differences(config, blocks["tensor_plan"], shape, lambda layer: kinds[layer] == SPARSE)
    return {**blocks, **experts, **common}


FAMILIES.register("nemotron_h")(
    Family(
        "NemotronHForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {
            "conv_kernel": 4,
            "head_dim": 128,
            "intermediate_size": 21504,
            "mamba_head_dim": 64,
            "mamba_num_heads": 128,
            "max_position_embeddings": 4096,
            "mlp_hidden_act": "relu2",
            **dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size"), 7688),
            **dict.fromkeys(("n_group", "topk_group"), 1),
            "n_groups": 8,
            "n_routed_experts": 8,
            **dict.fromkeys(("norm_topk_prob", "use_conv_bias"), True),
            "num_experts_per_tok": 2,
            "num_key_value_heads": 8,
            "routed_scaling_factor": 1.0,
            "ssm_state_size": 128,
            "time_step_min": 0.001,
        },
        activation_key="mlp_hidden_act",
        gated=False,
        complete=_complete,
        derived=("num_hidden_layers",),
    )
)

ARCHITECTURES.register("nemotron_h")(single_block_architecture("nemotron_h", "NemotronHForCausalLM", _FILES))
