"""Phi-3, Phi-4 and Phi-4-mini: Llama with fused projections, windows and partial RoPE. arXiv:2404.14219."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, Architecture
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.nn.rope import stored_settings

_FORMER_LONGROPE = ("su", "yarn")
"""Names of LongRoPE in early Phi-3 models."""


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = stored_settings(config)
    if (settings.get("rope_type") or settings.get("type")) not in _FORMER_LONGROPE or "short_factor" not in settings:
        return config
    return {**config, "rope_scaling": {**settings, "rope_type": "longrope"}}


def _differences(config: ConfigReader) -> dict[str, Any]:
    for key in ("resid_pdrop", "embd_pdrop", "attention_dropout"):
        if config.value(key):
            raise ValueError(f"{key} {config.value(key)!r} in config.json is not supported for phi3; set it to 0.0")
    window = None if config.value("sliding_window") is None else config.size("sliding_window")
    return {"windows": (window,) * config.size("num_hidden_layers")}


FAMILIES.register("phi3")(
    Family(
        "Phi3ForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {"original_max_position_embeddings": 4096, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5},
        complete=_complete,
        fused_layers={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
    )
)

ARCHITECTURES.register("phi3")(
    Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {**PRE_NORM, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        has_window=True,
        is_partly_rotated=True,
    )
)
