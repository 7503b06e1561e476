"""Architectures of GGUF files: names and layout of their tensors, and the config.json keys that a family needs.

llama.cpp's converter changes some tensors. Reading undoes it:

- It permutes the query and key rows of models with Llama's rotation, from the halves of a head to neighbouring
  channels. Families whose config already rotates neighbouring channels (ERNIE 4.5, Cohere 2) are stored as they are.
- It stores the scale of Gemma's norms, 1 + w, instead of w.
- It stacks the matrices of a layer's experts. They are read under the names of the single matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.gguf import GgufFile

_PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_PRE_NORM = {**_PROJECTIONS, "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SANDWICH = {
    **_PROJECTIONS,
    **_POST_NORMS,
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
}
_EXPERTS = {
    **_PRE_NORM,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}


def shortest_decimal(value: float) -> float:
    """Return the shortest decimal equal to a stored float32: 1e-05 instead of 9.99999974737e-06."""
    return float(str(np.float32(value)))


def count(file: GgufFile, key: str, default: int | None = None, minimum: int = 1) -> int:
    """Return a whole number under the architecture's prefix; without a default, it must exist.

    Raises:
        ValueError: the number is missing, or less than the minimum.
    """
    key = file.architecture_key(key)
    value = file.require(key, int) if default is None else file.get(key, int, default)
    if value < minimum:
        raise ValueError(f"{file.path}: {key} is {value}, less than {minimum}; the file is damaged")
    return value


@dataclass(frozen=True)
class Architecture:
    """Layout of the files of one `general.architecture`.

    Attributes:
        model_type, class_name: names in config.json.
        in_block: layer names in Hugging Face's models by the names in a block `blk.N.`; `{}` stands for the index of
            an expert, the first axis of a stored tensor. Names with an ending stand for one tensor of a layer.
        permutes: whether the rows of queries and keys are permuted.
        norm_offset: number that was added to the weights of norms.
        norm_epsilon: name of the norms' epsilon, in the metadata and in config.json.
        has_window: whether the family has sliding windows.
        is_partly_rotated: whether the rotation may leave channels of a head as they are.
        settings: function from the file to further keys of config.json.
    """

    model_type: str
    class_name: str
    in_block: Mapping[str, str]
    permutes: bool = False
    norm_offset: float = 0.0
    norm_epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    has_window: bool = False
    is_partly_rotated: bool = False
    settings: Callable[[GgufFile], dict[str, Any]] = lambda file: {}


def _number(file: GgufFile, key: str, default: float | None = None) -> float:
    """Return a number under the architecture's prefix; without a default, it must exist."""
    key = file.architecture_key(key)
    return shortest_decimal(file.require(key, float) if default is None else file.get(key, float, default))


def _window(file: GgufFile) -> dict[str, int]:
    return {"sliding_window": file.require(file.architecture_key("attention.sliding_window"), int)}


def _has(file: GgufFile, name: str) -> bool:
    return f"blk.0.{name}.bias" in file.tensors


def _attention_bias(file: GgufFile) -> dict[str, bool]:
    if _has(file, "attn_q") != _has(file, "attn_output"):
        raise ValueError(f"{file.path}: a bias on only some attention projections, which config.json cannot express")
    return {"attention_bias": _has(file, "attn_q")}


def _llama(file: GgufFile) -> dict[str, Any]:
    return {**_attention_bias(file), "mlp_bias": _has(file, "ffn_gate")}


def _granite(file: GgufFile) -> dict[str, Any]:
    return {
        **_llama(file),
        "attention_multiplier": _number(file, "attention.scale"),
        "embedding_multiplier": _number(file, "embedding_scale"),
        "residual_multiplier": _number(file, "residual_scale"),
        "logits_scaling": _number(file, "logit_scale"),
    }


def _smollm3(file: GgufFile) -> dict[str, Any]:
    return {**_llama(file), "no_rope_layer_interval": 4}


def _cohere2(file: GgufFile) -> dict[str, Any]:
    return {
        **_attention_bias(file),
        **_window(file),
        "logit_scale": _number(file, "logit_scale"),
        "sliding_window_pattern": 4,
    }


def _gemma(file: GgufFile, largest: int) -> dict[str, Any]:
    """Return the keys of Gemma 2 and 3; the file does not tell the scale of the scores.

    Args:
        file: the model.
        largest: number of layers of the family's largest model, which alone scales by the width of a head that
            hidden_size / num_attention_heads would give.
    """
    layers, hidden, heads = (
        file.require(file.architecture_key(key), int)
        for key in ("block_count", "embedding_length", "attention.head_count")
    )
    head_dim = file.require(file.architecture_key("attention.key_length"), int)
    return {
        **_attention_bias(file),
        **_window(file),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // heads if layers == largest else head_dim,
    }


def _gemma2(file: GgufFile) -> dict[str, Any]:
    return {
        **_gemma(file, 46),
        "attn_logit_softcapping": _number(file, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _number(file, "final_logit_softcapping", 30.0),
    }


def _gemma3(file: GgufFile) -> dict[str, Any]:
    return {
        **_gemma(file, 62),
        "rope_local_base_freq": _number(file, "rope.freq_base_swa", 10000.0),
        "sliding_window_pattern": 6,
    }


def _softmax_experts(file: GgufFile, experts: str, chosen: str = "num_experts_per_tok") -> dict[str, Any]:
    """Return the numbers of experts, under these names, of a model whose routers have softmax scores.

    Raises:
        ValueError: a router of another kind.
    """
    groups, scale = count(file, "expert_group_count", 1, minimum=0), _number(file, "expert_weights_scale", 1.0)
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
        "qkv_bias": _has(file, "attn_q"),
    }


def _qwen3_moe(file: GgufFile) -> dict[str, Any]:
    return {**_qwen_experts(file, normalizes=True), **_attention_bias(file)}


def _ernie4_5_moe(file: GgufFile) -> dict[str, Any]:
    return {
        **_softmax_experts(file, "moe_num_experts", "moe_k"),
        "use_bias": _has(file, "attn_q"),
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
        "attention_bias": _has(file, "attn_q"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "n_routed_experts": count(file, "expert_count"),
        "num_experts_per_tok": count(file, "expert_used_count"),
        "n_shared_experts": count(file, "expert_shared_count", 0, minimum=0),
        "moe_intermediate_size": count(file, "expert_feed_forward_length"),
        "first_k_dense_replace": count(file, "leading_dense_block_count", minimum=0),
        "n_group": count(file, "expert_group_count", 1),
        "topk_group": count(file, "expert_group_used_count", 1),
        "routed_scaling_factor": _number(file, "expert_weights_scale", 1.0),
        "norm_topk_prob": file.get(file.architecture_key("expert_weights_norm"), bool, False),
    }


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _PRE_NORM, permutes=True, has_window=True, settings=_llama),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _PRE_NORM),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", {**_PRE_NORM, **_QK_NORMS}, settings=_attention_bias),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {**_PRE_NORM, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        has_window=True,
        is_partly_rotated=True,
    ),
    "glm4": Architecture(
        "glm4",
        "Glm4ForCausalLM",
        {
            **_PRE_NORM,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        is_partly_rotated=True,
        settings=lambda file: {"attention_bias": _has(file, "attn_q")},
    ),
    "granite": Architecture("granite", "GraniteForCausalLM", _PRE_NORM, permutes=True, settings=_granite),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", _PRE_NORM, permutes=True, settings=_smollm3),
    "ernie4_5": Architecture(
        "ernie4_5", "Ernie4_5ForCausalLM", _PRE_NORM, settings=lambda file: {"use_bias": _has(file, "attn_q")}
    ),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        {**_PRE_NORM, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        settings=_attention_bias,
    ),
    "olmo2": Architecture(
        "olmo2", "Olmo2ForCausalLM", {**_PROJECTIONS, **_POST_NORMS, **_QK_NORMS}, settings=_attention_bias
    ),
    "cohere2": Architecture(
        "cohere2",
        "Cohere2ForCausalLM",
        {**_PROJECTIONS, "attn_norm": "input_layernorm"},
        norm_epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
        has_window=True,
        settings=_cohere2,
    ),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", _SANDWICH, norm_offset=1.0, has_window=True, settings=_gemma2
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {**_SANDWICH, **_QK_NORMS},
        norm_offset=1.0,
        has_window=True,
        settings=_gemma3,
    ),
}

"""Architectures of dense models."""
WITH_EXPERTS = {
    "llama": Architecture(
        "mixtral",
        "MixtralForCausalLM",
        {
            **_PRE_NORM,
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
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", {**_EXPERTS, **_QK_NORMS}, settings=_qwen3_moe),
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
            **_QK_NORMS,
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
        is_partly_rotated=True,
        settings=_glm4_moe,
    ),
}
"""Architectures of models with experts, those whose `expert_count` is at least 1."""


def architecture_of(file: GgufFile) -> Architecture:
    """Return the layout of a file.

    Raises:
        ValueError: another architecture.
    """
    has_experts = bool(file.get(file.architecture_key("expert_count"), int, 0))
    known = WITH_EXPERTS if has_experts else ARCHITECTURES
    if file.architecture not in known:
        raise ValueError(
            f"{file.path}: GGUF architecture {file.architecture!r} {'with' if has_experts else 'without'} experts is "
            f"not supported; known: {', '.join(ARCHITECTURES)} (Mistral's files call themselves llama); with experts: "
            f"{', '.join(WITH_EXPERTS)} (Mixtral's files call themselves llama)"
        )
    return known[file.architecture]


def num_layers(file: GgufFile) -> int:
    """Return the number of layers, without the last ones that predict further tokens in training."""
    unread = count(file, "nextn_predict_layers", 0, minimum=0)
    return count(file, "block_count", minimum=unread + 1) - unread
