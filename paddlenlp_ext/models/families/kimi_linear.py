"""Kimi Linear: Kimi delta attention in most layers, latent attention without RoPE in the others. Moonshot AI 2025.

arXiv:2510.26692. Experts and routers are like DeepSeek V3's. Files store the convolution of a layer in three parts, and
name forget gates and experts differently from the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.renamed_experts import RenamedExperts
from paddlenlp_ext.checkpoint.file_layouts.renamed_tensors import RenamedTensors
from paddlenlp_ext.checkpoint.file_layouts.split_rows import SplitRows
from paddlenlp_ext.checkpoint.file_layouts.stacked_experts import StackedExperts
from paddlenlp_ext.models.families.deepseek_v2 import latent_experts
from paddlenlp_ext.models.kimi_delta_config import (
    KIMI_DELTA_DEFAULTS,
    KIMI_DELTA_TENSOR_PLAN,
    complete_kimi_delta,
    kimi_delta_mixers,
)
from paddlenlp_ext.models.latent_attention_config import complete_latent
from paddlenlp_ext.models.moe_config import sigmoid_router, sparse_by_type
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family, require

_ATTENTION = "model.layers.*.self_attn"
_GATE = f"{_ATTENTION}.forget_gate"
_MLP, _SPARSE = "model.layers.*.mlp", "model.layers.*.block_sparse_moe"
_STACKS = {
    "mlp.experts.gate_up_proj.weight": ("mlp.experts.{}.w1.weight", "mlp.experts.{}.w3.weight"),
    "mlp.experts.down_proj.weight": ("mlp.experts.{}.w2.weight",),
}


def _files(feed_forwards: Mapping[str, str]) -> RenamedExperts:
    """Return the names of files, given the names of feed-forwards in memory and in files."""
    layers = {f"{_GATE}.{name}": f"{_ATTENTION}.{name}" for name in ("f_a_proj", "f_b_proj")}
    tensors = {f"{_GATE}.{name}": f"{_ATTENTION}.{name}" for name in ("dt_bias", "A_log")}
    names = RenamedTensors({**layers, **feed_forwards}, tensors=tensors)
    return RenamedExperts(RenamedTensors({}), StackedExperts(_STACKS), prefixes=names)


_WRITTEN = _files({f"{_MLP}.{name}": f"{_SPARSE}.{name}" for name in ("gate", "experts", "shared_experts")})
_READ = _files({_MLP: _SPARSE})  # transformers also writes dense feed-forwards under this name
_CONVOLUTIONS = {"self_attn.conv1d": dict.fromkeys((f"self_attn.{part}_conv1d" for part in "qkv"), 1)}
_PUBLISHED_NAMES = {
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
}
"""Common key -> key of the published models."""


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the keys of the published models with the common keys.

    Raises:
        ValueError: see `complete_kimi_delta` and `complete_latent`.
    """
    completed = complete_kimi_delta(config)
    completed.setdefault("n_routed_experts", config.get("num_local_experts"))
    for key, published in _PUBLISHED_NAMES.items():
        completed[key] = config[published] if published in config else completed.get(key)
    return complete_latent({key: value for key, value in completed.items() if value is not None})


def _differences(config: ConfigReader) -> dict[str, Any]:
    require(config, "moe_router_activation_func", None, "sigmoid")
    require(config, "mla_use_nope", None, True)
    layers, mixers = config.size("num_hidden_layers"), kimi_delta_mixers(config)
    first = config.value("first_k_dense_replace")
    sparse = sparse_by_type(config, num_dense=min(1 if first is None else first, layers))
    differences = latent_experts(config, sigmoid_router(config), sparse, rotates=(False,) * layers)
    plan = differences["tensor_plan"]
    if None not in mixers:
        plan = {name: style for name, style in plan.items() if ".kv_" not in name and ".q_a" not in name}
    return {
        **differences,
        "file_layout": SplitRows(_CONVOLUTIONS, read=_READ, written=_WRITTEN),
        "mixers": mixers,
        "tensor_plan": {**plan, **KIMI_DELTA_TENSOR_PLAN} if any(mixers) else plan,
    }


FAMILIES.register("kimi_linear")(
    Family(
        "KimiLinearForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {
            **KIMI_DELTA_DEFAULTS,
            "kv_lora_rank": 512,
            "max_position_embeddings": 1_048_576,
            "moe_intermediate_size": 1024,
            "n_group": 1,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 2.446,
            "topk_group": 1,
            "v_head_dim": 128,
        },
        complete=_complete,
    )
)
