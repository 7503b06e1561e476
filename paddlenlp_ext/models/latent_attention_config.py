"""Config of families with multi-head latent attention (MLA): defaults, checks and `DecoderConfig` attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, ConfigReader
from paddlenlp_ext.models.sliding_windows import full_attention
from paddlenlp_ext.nn.latent_attention import LatentShape
from paddlenlp_ext.nn.rope import yarn_temperature
from paddlenlp_ext.sharding_spec import TensorPlan

LATENT_DEFAULTS: dict[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_QUERIES: TensorPlan = {"q_proj": "colwise"}
_COMPRESSED_QUERIES: TensorPlan = {
    "q_a_proj": "replicated",
    "q_a_layernorm": "replicated",
    "q_b_proj": "inner_colwise",
}
_KEYS_AND_VALUES: TensorPlan = {
    "kv_a_proj_with_mqa": "replicated",
    "kv_a_layernorm": "replicated",
    "kv_b_proj": "inner_colwise",
}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def complete_latent(config: Mapping[str, Any], rotated_dim: int = 64) -> Mapping[str, Any]:
    """Return a copy of a config with `head_dim` set to `qk_rope_head_dim`, and `num_key_value_heads` set to None.

    Args:
        config: contents of config.json.
        rotated_dim: `head_dim` for a config without `qk_rope_head_dim`.

    Raises:
        ValueError: `num_key_value_heads` differs from `num_attention_heads`.
    """
    heads = config.get("num_key_value_heads")
    if heads not in (None, config.get("num_attention_heads")):
        raise ValueError(
            f"num_key_value_heads {heads} in config.json: latent attention has one key head per query head; set it to "
            f"num_attention_heads, {config.get('num_attention_heads')}"
        )
    return {**config, "num_key_value_heads": None, "head_dim": config.get("qk_rope_head_dim", rotated_dim)}


def latent_differences(config: ConfigReader) -> dict[str, Any]:
    """Return the `DecoderConfig` attributes of a decoder with latent attention in every layer."""
    unrotated, rotated = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    rank = None if config.value("q_lora_rank") is None else config.size("q_lora_rank")
    bias = bool(config.value("attention_bias"))
    return {
        "head_dim": unrotated + rotated,
        "latent": LatentShape(
            query_rank=rank,
            kv_rank=config.size("kv_lora_rank"),
            unrotated_dim=unrotated,
            rotated_dim=rotated,
            value_dim=config.size("v_head_dim"),
        ),
        "attention_scale": (unrotated + rotated) ** -0.5 * _score_factor(config),
        "interleaved_rope": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "windows": full_attention(config),
        "tensor_plan": _tensor_plan(_QUERIES if rank is None else _COMPRESSED_QUERIES),
    }


def _tensor_plan(queries: TensorPlan) -> TensorPlan:
    """Return the tensor plan of a decoder with latent attention. Every rank computes the full latents."""
    common = {name: style for name, style in DECODER_TENSOR_PLAN.items() if not name.endswith(_PROJECTIONS)}
    own = {**queries, **_KEYS_AND_VALUES}
    return {**common, **{f"model.layers.*.self_attn.{name}": style for name, style in own.items()}}


def _score_factor(config: ConfigReader) -> float:
    """Return the factor of the attention scores that `mscale_all_dim` of the rope scaling determines; 1 if unset."""
    settings = config.value("rope_scaling") or config.value("rope_parameters") or {}
    weight = settings.get("mscale_all_dim")
    if (settings.get("rope_type") or settings.get("type") or "default") == "default" or not weight:
        return 1.0
    if settings.get("factor") is None:
        raise ValueError("mscale_all_dim in the rope settings of config.json needs 'factor'")
    return yarn_temperature(settings["factor"], weight) ** 2
