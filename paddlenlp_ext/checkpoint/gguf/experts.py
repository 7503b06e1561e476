"""Architectures of GGUF files of models with experts.

Files stack the matrices of a layer's experts. They are read under the names of the single matrices.
"""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.gguf import GgufFile
from paddlenlp_ext.checkpoint.gguf.architecture import (
    PRE_NORM,
    QK_NORMS,
    Architecture,
    attention_bias,
    count,
    has_bias,
    number,
)
from paddlenlp_ext.checkpoint.gguf.interleaved import InterleavedGates
from paddlenlp_ext.checkpoint.gguf.latent import LATENT, JoinedLatents, latent_settings

_ROUTED = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_EXPERTS = {**PRE_NORM, **_ROUTED}
_SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}


def _softmax_experts(file: GgufFile, experts: str, chosen: str = "num_experts_per_tok") -> dict[str, Any]:
    """Return the numbers of experts, under these names, of a model whose routers have softmax scores.

    Raises:
        ValueError: a router of another kind.
    """
    groups, scale = count(file, "expert_group_count", 1, minimum=0), number(file, "expert_weights_scale", 1.0)
    if count(file, "expert_gating_func", 1, minimum=0) not in (0, 1) or groups > 1 or scale not in (0.0, 1.0):
        raise ValueError(
            f"{file.path}: {file.architecture} whose router has other scores than softmax, groups of experts, or "
            "scaled weights is not supported; use the model's folder"
        )
    return {experts: count(file, "expert_count"), chosen: count(file, "expert_used_count")}


def _qwen_experts(file: GgufFile, normalizes: bool) -> dict[str, Any]:
    return {
        **_softmax_experts(file, "num_experts"),
        "moe_intermediate_size": count(file, "expert_feed_forward_length"),
        "norm_topk_prob": file.get(file.architecture_key("expert_weights_norm"), bool, normalizes),
    }


def _qwen2_moe(file: GgufFile) -> dict[str, Any]:
    return {
        **_qwen_experts(file, normalizes=False),
        "shared_expert_intermediate_size": count(file, "expert_shared_feed_forward_length"),
        "qkv_bias": has_bias(file, "attn_q"),
    }


def _qwen3_moe(file: GgufFile) -> dict[str, Any]:
    return {**_qwen_experts(file, normalizes=True), **attention_bias(file)}


def _ernie4_5_moe(file: GgufFile) -> dict[str, Any]:
    return {
        **_softmax_experts(file, "moe_num_experts", "moe_k"),
        "use_bias": has_bias(file, "attn_q"),
        "moe_intermediate_size": count(file, "expert_feed_forward_length"),
        "moe_num_shared_experts": count(file, "expert_shared_count", 0, minimum=0),
        "moe_layer_start_index": count(file, "leading_dense_block_count", minimum=0),
        "moe_layer_interval": count(file, "interleave_moe_layer_step"),
    }


def _glm4_moe(file: GgufFile) -> dict[str, Any]:
    """Return the keys of a model whose routers have sigmoid scores.

    Raises:
        ValueError: a router of another kind.
    """
    scores = count(file, "expert_gating_func", 2, minimum=0)
    if scores not in (0, 2):
        raise ValueError(f"{file.path}: glm4moe with expert_gating_func {scores} is not supported; known: 2 (sigmoid)")
    return {
        **_experts_of_groups(file),
        "attention_bias": has_bias(file, "attn_q"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def _deepseek2(file: GgufFile) -> dict[str, Any]:
    """Return the keys of DeepSeek V2, or of V3 if routers have sigmoid scores, as those of GLM-4.7-Flash.

    Files without `expert_gating_func` have sigmoid scores if there is a correction of the choice.

    Raises:
        ValueError: a router of another kind.
    """
    is_corrected = any(name.endswith(".exp_probs_b.bias") for name in file.tensors)
    scores = count(file, "expert_gating_func", 0, minimum=0) or (2 if is_corrected else 1)
    if scores not in (1, 2):
        raise ValueError(
            f"{file.path}: deepseek2 with expert_gating_func {scores} is not supported; known: 1 (softmax), 2 (sigmoid)"
        )
    keys = {**latent_settings(file), **_experts_of_groups(file)}
    if scores == 2:
        return {**keys, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    return {**keys, "topk_method": "group_limited_greedy" if keys["n_group"] > 1 else "greedy"}


def _experts_of_groups(file: GgufFile) -> dict[str, Any]:
    """Return the keys of routed and shared experts, chosen within groups, as DeepSeek's configs name them."""
    return {
        "n_routed_experts": count(file, "expert_count"),
        "num_experts_per_tok": count(file, "expert_used_count"),
        "n_shared_experts": count(file, "expert_shared_count", 0, minimum=0),
        "moe_intermediate_size": count(file, "expert_feed_forward_length"),
        "first_k_dense_replace": count(file, "leading_dense_block_count", minimum=0),
        "n_group": count(file, "expert_group_count", 1),
        "topk_group": count(file, "expert_group_used_count", 1),
        "routed_scaling_factor": number(file, "expert_weights_scale", 1.0),
        "norm_topk_prob": file.get(file.architecture_key("expert_weights_norm"), bool, False),
    }


def _gpt_oss(file: GgufFile) -> dict[str, Any]:
    """Return the keys of gpt-oss; the file does not tell the bounds of the gate, which llama.cpp knows too.

    Raises:
        ValueError: a file without the rotary scaling of the published models.
    """
    scaling = file.get(file.architecture_key("rope.scaling.type"), str, "none")
    if scaling != "yarn":
        raise ValueError(f"{file.path}: gpt-oss with the rotary scaling {scaling!r} is not supported; known: yarn")
    return {
        **attention_bias(file),
        "num_local_experts": count(file, "expert_count"),
        "num_experts_per_tok": count(file, "expert_used_count"),
        "intermediate_size": count(file, "expert_feed_forward_length"),
        "sliding_window": count(file, "attention.sliding_window"),
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }


WITH_EXPERTS = {
    "llama": Architecture(
        "mixtral",
        "MixtralForCausalLM",
        {
            **PRE_NORM,
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        },
        permutes=True,
        has_window=True,
        settings=lambda file: _softmax_experts(file, "num_local_experts"),
    ),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {
            **_EXPERTS,
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        settings=_qwen2_moe,
    ),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", {**_EXPERTS, **QK_NORMS}, settings=_qwen3_moe),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        {**_EXPERTS, **_SHARED_EXPERTS, "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        settings=_ernie4_5_moe,
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        {
            **_EXPERTS,
            **_SHARED_EXPERTS,
            **QK_NORMS,
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
        is_partly_rotated=True,
        settings=_glm4_moe,
    ),
    "deepseek2": Architecture(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        {**LATENT, **_ROUTED, **_SHARED_EXPERTS, "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        is_latent=True,
        restore=JoinedLatents,
        settings=_deepseek2,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        {
            **PRE_NORM,
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps.weight": "mlp.experts.gate_proj",
            "ffn_gate_exps.bias": "mlp.experts.gate_proj_bias",
            "ffn_up_exps.weight": "mlp.experts.up_proj",
            "ffn_up_exps.bias": "mlp.experts.up_proj_bias",
            "ffn_down_exps.weight": "mlp.experts.down_proj",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        has_window=True,
        truncates_yarn=False,
        restore=InterleavedGates,
        settings=_gpt_oss,
    ),
}
"""Architectures of models with experts, those whose `expert_count` is at least 1."""
