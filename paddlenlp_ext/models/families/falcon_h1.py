"""Falcon H1: attention and Mamba-2 side by side in every layer. TII 2025, arXiv:2507.22448.

Files store weights without the multipliers of config.json; the weights in GGUF files contain the multipliers.
"""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.renamed_tensors import RenamedTensors
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.checkpoint.gguf.two_mixers import MULTIPLIERS, two_mixer_architecture
from paddlenlp_ext.models.mamba_config import MAMBA_DEFAULTS, MAMBA_TENSOR_PLAN, mamba_shape
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family, require
from paddlenlp_ext.models.sliding_windows import full_attention
from paddlenlp_ext.nn.mamba2 import Mamba2Shape
from paddlenlp_ext.nn.token_mixer import SideMixer

_FILES = RenamedTensors(
    {"model.norm": "model.final_layernorm", "model.layers.*.mlp": "model.layers.*.feed_forward"}, in_adapters=True
)


def _mamba_shape(config: ConfigReader) -> Mamba2Shape:
    norm = "norm_first" if config.value("mamba_norm_before_gate") else "gate_first"
    return mamba_shape(
        config,
        norm=norm if config.value("mamba_rms_norm") else None,
        section_scales=_scales(config, "ssm_multipliers", 5),
    )


def _scales(config: ConfigReader, key: str, count: int) -> tuple[float, ...] | None:
    """Return the multipliers of a key of config.json; None if the key is null or absent.

    Raises:
        ValueError: the key does not have `count` multipliers.
    """
    values = config.value(key)
    if values is not None and len(values) != count:
        raise ValueError(f"{key} in config.json must have {count} numbers, got {len(values)}")
    return None if values is None else tuple(map(float, values))


def _differences(config: ConfigReader) -> dict[str, Any]:
    require(config, "projectors_bias", None, bool(config.value("mamba_proj_bias")))
    bias, mamba = bool(config.value("attention_bias")), _mamba_shape(config)
    head_dim = config.size("head_dim", config.size("hidden_size") // config.size("num_attention_heads"))
    factor = {name: float(config.value(name)) for name in MULTIPLIERS}
    plan = {**DECODER_TENSOR_PLAN, **MAMBA_TENSOR_PLAN}
    if mamba.norm is None:
        del plan["model.layers.*.mamba.norm"]
    return {
        "attention_scale": factor["key_multiplier"] * head_dim**-0.5,
        "embedding_multiplier": factor["embedding_multiplier"],
        "feed_forward_scales": _scales(config, "mlp_multipliers", 2),
        "file_layout": _FILES,
        "layer": "two_mixers",
        "logit_scale": factor["lm_head_multiplier"],
        "output_bias": bias,
        "pre_norms": ("input_layernorm", "pre_ff_layernorm"),
        "qkv_bias": bias,
        "side_mixer": SideMixer(
            shape=mamba,
            scales=(factor["ssm_in_multiplier"], factor["ssm_out_multiplier"]),
            attention_scales=(factor["attention_in_multiplier"], factor["attention_out_multiplier"]),
        ),
        "tensor_plan": plan,
        "windows": full_attention(config),
    }


FAMILIES.register("falcon_h1")(
    Family(
        "FalconH1ForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {
            **MAMBA_DEFAULTS,
            **dict.fromkeys(MULTIPLIERS, 1.0),
            "mamba_d_ssm": 1024,
            "mamba_norm_before_gate": True,
            "max_position_embeddings": 8192,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
        },
    )
)

ARCHITECTURES.register("falcon_h1")(two_mixer_architecture("falcon-h1", "FalconH1ForCausalLM"))
