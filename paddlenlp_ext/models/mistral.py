"""Mistral: Llama with a sliding window on every layer. Jiang et al. 2023, arXiv:2310.06825."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.models.llama import LLAMA_TENSOR_PLAN
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family


def _differences(config: ConfigReader) -> dict[str, Any]:
    window = None if config.value("sliding_window") is None else config.size("sliding_window")
    windows = (window,) * config.size("num_hidden_layers")
    return {"windows": windows}


FAMILIES.register("mistral")(
    Family("MistralForCausalLM", _differences, LLAMA_TENSOR_PLAN, {"sliding_window": 4096, "num_key_value_heads": 8})
)
