"""Ministral 3 and Devstral Small 2: Mistral with YaRN, and queries scaled by their position. Mistral AI 2025."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, Architecture, Key, number
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.nn.query_scale import QueryScale
from paddlenlp_ext.nn.rope import stored_settings

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_BETA = "query_scale_beta"
"""Key that `_complete` adds: the growth of the query scale (`QueryScale.beta`). GGUF files store this value."""


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the growth of the query scale; if the config has no rope settings, add the published models' settings."""
    if not any(config.get(key) for key in ("rope_parameters", "rope_scaling", "rope_theta")):
        config = {**config, "rope_parameters": _YARN}
    return {**config, _BETA: config.get(_BETA) or stored_settings(config).get("llama_4_scaling_beta")}


def _differences(config: ConfigReader) -> dict[str, Any]:
    window = None if config.value("sliding_window") is None else config.size("sliding_window")
    beta = config.value(_BETA)
    settings = config.value("rope_scaling") or config.value("rope_parameters") or {}
    context = config.value("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    scale = None
    if beta:
        if not context:
            raise ValueError(
                "llama_4_scaling_beta in the rope settings of config.json needs 'original_max_position_embeddings'"
            )
        scale = QueryScale(float(beta), int(context))
    return {"windows": (window,) * config.size("num_hidden_layers"), "query_scale": scale}


FAMILIES.register("ministral3")(
    Family(
        "Ministral3ForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {"head_dim": 128, "max_position_embeddings": 262144, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        complete=_complete,
    )
)


def _gguf_settings(file: GgufFile) -> dict[str, Any]:
    return {_BETA: number(file, "attention.temperature_scale", 0.0) or None}


ARCHITECTURES.register("ministral3")(
    Architecture(
        "mistral3",
        "Ministral3ForCausalLM",
        PRE_NORM,
        keys={_BETA: Key("attention.temperature_scale", float, default=0.0)},
        settings=_gguf_settings,
        permutes=True,
        yarn_multiplier=1.0,
    )
)
