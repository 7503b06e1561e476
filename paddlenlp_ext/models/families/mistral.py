"""Mistral: Llama with a sliding window in every layer. Jiang et al. 2023, arXiv:2310.06825."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, Architecture, has_window, projection_biases
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family


def _differences(config: ConfigReader) -> dict[str, Any]:
    window = None if config.value("sliding_window") is None else config.size("sliding_window")
    windows = (window,) * config.size("num_hidden_layers")
    return {"windows": windows}


FAMILIES.register("mistral")(
    Family("MistralForCausalLM", _differences, DECODER_TENSOR_PLAN, {"sliding_window": 4096, "num_key_value_heads": 8})
)

ARCHITECTURES.register("mistral")(
    Architecture(
        "llama",  # the converter of llama.cpp writes Mistral models as llama
        "MistralForCausalLM",
        PRE_NORM,
        settings=projection_biases,
        reads=has_window,
        permutes=True,
        has_window=True,
    )
)
