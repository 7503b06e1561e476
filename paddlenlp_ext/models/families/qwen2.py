"""Qwen2 and Qwen2.5: Llama with biases of q, k and v, and windows in the upper layers. arXiv:2407.10671."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, Architecture
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import sliding_windows


def _differences(config: ConfigReader) -> dict[str, Any]:
    return {"qkv_bias": True, "windows": sliding_windows(config)}


FAMILIES.register("qwen2")(
    Family("Qwen2ForCausalLM", _differences, DECODER_TENSOR_PLAN, {"sliding_window": 4096, "max_window_layers": 28})
)

ARCHITECTURES.register("qwen2")(Architecture("qwen2", "Qwen2ForCausalLM", PRE_NORM))
