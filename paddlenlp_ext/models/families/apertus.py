"""Apertus: xIELU feed-forward without a gate, QK norms per head. Swiss AI 2025, arXiv:2509.14233."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import PROJECTIONS, QK_NORMS, Architecture, attention_bias
from paddlenlp_ext.checkpoint.gguf.layer_scalars import LayerScalars, ListedTensor, scalar_metadata, without_scalars
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.families.arcee import UNGATED_TENSOR_PLAN
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import full_attention
from paddlenlp_ext.nn.attention import QKNorm
from paddlenlp_ext.sharding_spec import TensorPlan

_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_TENSOR_PLAN: TensorPlan = {
    **UNGATED_TENSOR_PLAN,
    "model.layers.*.self_attn.q_norm": "replicated",
    "model.layers.*.self_attn.k_norm": "replicated",
    "model.layers.*.mlp.act_fn": "replicated",
}


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config; if it has no rope settings, add the settings of the published models."""
    has_settings = any(config.get(key) for key in ("rope_parameters", "rope_scaling", "rope_theta"))
    return config if has_settings else {**config, "rope_parameters": _ROPE}


def _differences(config: ConfigReader) -> dict[str, Any]:
    bias = bool(config.value("attention_bias"))
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "pre_norms": ("attention_layernorm", "feedforward_layernorm"),
        "qk_norm": QKNorm(),
        "windows": full_attention(config),
    }


FAMILIES.register("apertus")(
    Family(
        "ApertusForCausalLM",
        _differences,
        _TENSOR_PLAN,
        {"hidden_act": "xielu", "max_position_embeddings": 65536, "rms_norm_eps": 1e-5},
        gated=False,
        complete=_complete,
    )
)

_XIELU = {
    "mlp.act_fn.alpha_p": ListedTensor("xielu.alpha_p", (1,)),
    "mlp.act_fn.alpha_n": ListedTensor("xielu.alpha_n", (1,)),
    "mlp.act_fn.beta": ListedTensor("xielu.beta", ()),
    "mlp.act_fn.eps": ListedTensor("xielu.eps", ()),
}

ARCHITECTURES.register("apertus")(
    Architecture(
        "apertus",
        "ApertusForCausalLM",
        {
            **{stored: name for stored, name in PROJECTIONS.items() if stored != "ffn_gate"},
            **QK_NORMS,
            "attn_norm": "attention_layernorm",
            "ffn_norm": "feedforward_layernorm",
        },
        constants={"hidden_act": "xielu"},
        settings=attention_bias,
        restore=lambda source: LayerScalars(source, _XIELU),
        split=lambda tensors, config: without_scalars(tensors, _XIELU),
        tensor_metadata=lambda tensors: scalar_metadata(tensors, _XIELU),
    )
)
