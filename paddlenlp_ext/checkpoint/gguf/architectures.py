"""Architectures of GGUF files: names and layout of their tensors, and the config.json keys that a family needs.

llama.cpp's converter changes some tensors. Reading undoes it:

- It permutes the query and key rows of models with Llama's rotation, from the halves of a head to neighbouring
  channels. Families whose config already rotates neighbouring channels (ERNIE 4.5, Cohere 2) are stored as they are.
- It stores the scale of Gemma's norms, 1 + w, instead of w.
"""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.gguf import GgufFile
from paddlenlp_ext.checkpoint.gguf.architecture import (
    PRE_NORM,
    PROJECTIONS,
    QK_NORMS,
    Architecture,
    attention_bias,
    count,
    has_bias,
    number,
)
from paddlenlp_ext.checkpoint.gguf.experts import WITH_EXPERTS
from paddlenlp_ext.checkpoint.gguf.latent import LATENT, JoinedLatents, latent_settings

_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SANDWICH = {
    **PROJECTIONS,
    **_POST_NORMS,
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
}


def _window(file: GgufFile) -> dict[str, int]:
    return {"sliding_window": file.require(file.architecture_key("attention.sliding_window"), int)}


def _llama(file: GgufFile) -> dict[str, Any]:
    return {**attention_bias(file), "mlp_bias": has_bias(file, "ffn_gate")}


def _granite(file: GgufFile) -> dict[str, Any]:
    return {
        **_llama(file),
        "attention_multiplier": number(file, "attention.scale"),
        "embedding_multiplier": number(file, "embedding_scale"),
        "residual_multiplier": number(file, "residual_scale"),
        "logits_scaling": number(file, "logit_scale"),
    }


def _smollm3(file: GgufFile) -> dict[str, Any]:
    return {**_llama(file), "no_rope_layer_interval": 4}


def _cohere2(file: GgufFile) -> dict[str, Any]:
    return {
        **attention_bias(file),
        **_window(file),
        "logit_scale": number(file, "logit_scale"),
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
        **attention_bias(file),
        **_window(file),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // heads if layers == largest else head_dim,
    }


def _gemma2(file: GgufFile) -> dict[str, Any]:
    return {
        **_gemma(file, 46),
        "attn_logit_softcapping": number(file, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": number(file, "final_logit_softcapping", 30.0),
    }


def _gemma3(file: GgufFile) -> dict[str, Any]:
    return {
        **_gemma(file, 62),
        "rope_local_base_freq": number(file, "rope.freq_base_swa", 10000.0),
        "sliding_window_pattern": 6,
    }


def _minicpm3(file: GgufFile) -> dict[str, Any]:
    """Return the keys of MiniCPM3; the file does not tell the factors of the published model, which llama.cpp knows."""
    return {
        **latent_settings(file),
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "original_max_position_embeddings": count(file, "context_length"),
    }


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", PRE_NORM, permutes=True, has_window=True, settings=_llama),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", PRE_NORM),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", {**PRE_NORM, **QK_NORMS}, settings=attention_bias),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {**PRE_NORM, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        has_window=True,
        is_partly_rotated=True,
    ),
    "glm4": Architecture(
        "glm4",
        "Glm4ForCausalLM",
        {
            **PRE_NORM,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        is_partly_rotated=True,
        settings=lambda file: {"attention_bias": has_bias(file, "attn_q")},
    ),
    "granite": Architecture("granite", "GraniteForCausalLM", PRE_NORM, permutes=True, settings=_granite),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", PRE_NORM, permutes=True, settings=_smollm3),
    "ernie4_5": Architecture(
        "ernie4_5", "Ernie4_5ForCausalLM", PRE_NORM, settings=lambda file: {"use_bias": has_bias(file, "attn_q")}
    ),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        {**PRE_NORM, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        settings=attention_bias,
    ),
    "olmo2": Architecture(
        "olmo2", "Olmo2ForCausalLM", {**PROJECTIONS, **_POST_NORMS, **QK_NORMS}, settings=attention_bias
    ),
    "cohere2": Architecture(
        "cohere2",
        "Cohere2ForCausalLM",
        {**PROJECTIONS, "attn_norm": "input_layernorm"},
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
        {**_SANDWICH, **QK_NORMS},
        norm_offset=1.0,
        has_window=True,
        settings=_gemma3,
    ),
    "minicpm3": Architecture(
        "minicpm3", "MiniCPM3ForCausalLM", LATENT, is_latent=True, restore=JoinedLatents, settings=_minicpm3
    ),
}

"""Architectures of dense models."""


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
    return count(file, "block_count", minimum=unread + 1, maximum=unread + 1024) - unread
