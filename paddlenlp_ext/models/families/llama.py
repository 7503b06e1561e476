"""Llama 1 to 3.x and models with the same architecture (SmolLM2, TinyLlama). Touvron et al. 2023, arXiv:2302.13971."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, Architecture, has_window, projection_biases
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import full_attention


def _differences(config: ConfigReader) -> dict[str, Any]:
    bias = bool(config.value("attention_bias"))
    return {"qkv_bias": bias, "output_bias": bias, "windows": full_attention(config)}


FAMILIES.register("llama")(Family("LlamaForCausalLM", _differences, DECODER_TENSOR_PLAN))

ARCHITECTURES.register("llama")(
    Architecture(
        "llama",
        "LlamaForCausalLM",
        PRE_NORM,
        settings=projection_biases,
        reads=lambda file: not has_window(file),
        permutes=True,
    )
)
