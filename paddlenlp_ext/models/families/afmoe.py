"""AFMoE (Trinity): gated attention, sandwich norms, experts chosen by sigmoid scores. Arcee AI 2025.

Three of every four layers have a sliding window, and the other layers have no RoPE.
"""

from __future__ import annotations

import math
from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.renamed_experts import RenamedExperts
from paddlenlp_ext.checkpoint.file_layouts.renamed_tensors import RenamedTensors
from paddlenlp_ext.checkpoint.file_layouts.stacked_experts import StackedExperts
from paddlenlp_ext.checkpoint.gguf.architecture import QK_NORMS, SANDWICH, Architecture, Key
from paddlenlp_ext.checkpoint.gguf.moe_tensors import EXPERT_KEYS, ROUTED_EXPERTS, SHARED_EXPERTS, normalized_sigmoid
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.families.qwen3 import QWEN3_TENSOR_PLAN
from paddlenlp_ext.models.moe_config import EXPERT_FILES, expert_differences
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import layer_types_of_pattern, windows_by_type
from paddlenlp_ext.nn.attention import QKNorm
from paddlenlp_ext.nn.experts import ExpertShape
from paddlenlp_ext.nn.routers import RouterOptions
from paddlenlp_ext.sharding_spec import TensorPlan

_TENSOR_PLAN: TensorPlan = {**QWEN3_TENSOR_PLAN, "model.layers.*.self_attn.gate_proj": "colwise"}
_FILES = RenamedExperts(
    RenamedTensors({"model.layers.*.mlp.gate": "model.layers.*.mlp.router.gate"}, in_adapters=True),
    StackedExperts(EXPERT_FILES, {"mlp.gate.e_score_correction_bias": "mlp.expert_bias"}),
)


def _differences(config: ConfigReader) -> dict[str, Any]:
    layers, dense = config.size("num_hidden_layers"), config.value("num_dense_layers") or 0
    windows = windows_by_type(config, layer_types_of_pattern(config.size("global_attn_every_n_layers"), layers))
    inner = config.size("moe_intermediate_size")
    bias = bool(config.value("attention_bias"))
    shape = ExpertShape(
        num_experts=config.size("num_experts"),
        intermediate_size=inner,
        router=RouterOptions(
            kind="sigmoid",
            top_k=config.size("num_experts_per_tok"),
            scale=float(config.value("route_scale")),
            correction_dims=1,
        ),
        shared_size=inner * config.size("num_shared_experts"),
    )
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "attention_gate": "gate_proj",
        "embedding_multiplier": math.sqrt(config.size("hidden_size")) if config.value("mup_enabled") else 1.0,
        "layer": "sandwich",
        "qk_norm": QKNorm(),
        "rotates": tuple(window is not None for window in windows),
        "sandwich_norms": (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_mlp_layernorm",
            "post_mlp_layernorm",
        ),
        "windows": windows,
        **expert_differences(config, _TENSOR_PLAN, shape, lambda layer: layer >= dense, _FILES),
    }


FAMILIES.register("afmoe")(
    Family(
        "AfmoeForCausalLM",
        _differences,
        _TENSOR_PLAN,
        {
            "global_attn_every_n_layers": 4,
            "head_dim": 128,
            "max_position_embeddings": 16384,
            "moe_intermediate_size": 1408,
            "mup_enabled": False,
            "num_dense_layers": 1,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "num_shared_experts": 2,
            "rms_norm_eps": 1e-5,
            "route_norm": True,
            "route_scale": 1.0,
            "sliding_window": 1024,
        },
        is_translated_by_peft=True,
    )
)

ARCHITECTURES.register("afmoe")(
    Architecture(
        "afmoe",
        "AfmoeForCausalLM",
        {
            **SANDWICH,
            **ROUTED_EXPERTS,
            **SHARED_EXPERTS,
            **QK_NORMS,
            "attn_gate": "self_attn.gate_proj",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b.bias": "mlp.expert_bias",
        },
        keys={
            **EXPERT_KEYS,
            "num_shared_experts": Key("expert_shared_count"),
            "num_dense_layers": Key("leading_dense_block_count", default=0, minimum=0),
            "route_norm": Key("expert_weights_norm", bool),
            "route_scale": Key("expert_weights_scale", float, default=1.0),
        },
        constants={"global_attn_every_n_layers": 4, "mup_enabled": True},  # fixed in llama.cpp
        settings=normalized_sigmoid,
        has_experts=True,
        has_window=True,
    )
)
