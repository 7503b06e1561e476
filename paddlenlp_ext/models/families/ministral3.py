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
QUERY_SCALE_BETA = "query_scale_beta"
"""Key that `complete_query_scale` adds: the growth of the query scale (`QueryScale.beta`), which GGUF files store."""


def complete_query_scale(config: Mapping[str, Any], ropes: Mapping[str, Any] = _YARN) -> Mapping[str, Any]:
    """Return a copy of a config.json dict with the growth of the query scale.

    Args:
        config: contents of config.json.
        ropes: rope settings of the published models, for a config without rope settings.
    """
    if not any(config.get(key) for key in ("rope_parameters", "rope_scaling", "rope_theta")):
        config = {**config, "rope_parameters": ropes}
    beta = config.get(QUERY_SCALE_BETA) or stored_settings(config).get("llama_4_scaling_beta")
    return {**config, QUERY_SCALE_BETA: beta}


def query_scale(config: ConfigReader) -> QueryScale | None:
    """Return the query scale of a config from `complete_query_scale`; None: queries are not scaled.

    Raises:
        ValueError: the config has a growth of the scale, but not the length of the original context.
    """
    beta = config.value(QUERY_SCALE_BETA)
    if not beta:
        return None
    settings = config.value("rope_scaling") or config.value("rope_parameters") or {}
    context = config.value("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    if not context:
        raise ValueError(
            "llama_4_scaling_beta in the rope settings of config.json needs 'original_max_position_embeddings'"
        )
    return QueryScale(float(beta), int(context))


def _differences(config: ConfigReader) -> dict[str, Any]:
    window = None if config.value("sliding_window") is None else config.size("sliding_window")
    return {"windows": (window,) * config.size("num_hidden_layers"), "query_scale": query_scale(config)}


FAMILIES.register("ministral3")(
    Family(
        "Ministral3ForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {"head_dim": 128, "max_position_embeddings": 262144, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        complete=complete_query_scale,
    )
)


def _gguf_settings(file: GgufFile) -> dict[str, Any]:
    return {QUERY_SCALE_BETA: number(file, "attention.temperature_scale", 0.0) or None}


ARCHITECTURES.register("ministral3")(
    Architecture(
        "mistral3",
        "Ministral3ForCausalLM",
        PRE_NORM,
        keys={QUERY_SCALE_BETA: Key("attention.temperature_scale", float, default=0.0)},
        settings=_gguf_settings,
        permutes=True,
        yarn_multiplier=1.0,
    )
)
