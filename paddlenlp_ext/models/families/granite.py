"""Granite 3: Llama with four multipliers (maximal update parametrization, arXiv:2203.03466). IBM 2024."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, Architecture, Key, projection_biases
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import full_attention


def granite_differences(config: ConfigReader) -> dict[str, Any]:
    """Return the differences from the common decoder, for a model with full attention in every layer."""
    bias = bool(config.value("attention_bias"))
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "attention_scale": float(config.value("attention_multiplier")),
        "embedding_multiplier": float(config.value("embedding_multiplier")),
        "residual_multiplier": float(config.value("residual_multiplier")),
        "logit_scale": 1.0 / float(config.value("logits_scaling")),
        "windows": full_attention(config),
    }


GRANITE_MULTIPLIERS = dict.fromkeys(
    ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0
)
"""Multipliers in config.json and their defaults."""

FAMILIES.register("granite")(
    Family("GraniteForCausalLM", granite_differences, DECODER_TENSOR_PLAN, GRANITE_MULTIPLIERS)
)

GRANITE_KEYS = {
    "attention_multiplier": Key("attention.scale", float),
    "embedding_multiplier": Key("embedding_scale", float),
    "residual_multiplier": Key("residual_scale", float),
    "logits_scaling": Key("logit_scale", float),
}
"""Metadata keys of the multipliers, by their keys in config.json."""
HYBRID_KEY = "rope.scaling.finetuned"
"""Metadata key that only files of Granite 4 have: whether the model has RoPE."""

ARCHITECTURES.register("granite")(
    Architecture(
        "granite",
        "GraniteForCausalLM",
        PRE_NORM,
        keys=GRANITE_KEYS,
        settings=projection_biases,
        reads=lambda file: file.architecture_key(HYBRID_KEY) not in file.metadata,
        permutes=True,
    )
)
