"""Qwen3: Qwen2 without biases, with QK norms per head. Yang et al. 2025, arXiv:2505.09388."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, QK_NORMS, Architecture, attention_bias
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import sliding_windows
from paddlenlp_ext.nn.attention import QKNorm
from paddlenlp_ext.sharding_spec import TensorPlan

QWEN3_TENSOR_PLAN: TensorPlan = {
    **DECODER_TENSOR_PLAN,
    "model.layers.*.self_attn.q_norm": "replicated",
    "model.layers.*.self_attn.k_norm": "replicated",
}


def _differences(config: ConfigReader) -> dict[str, Any]:
    bias = bool(config.value("attention_bias"))
    return {"qkv_bias": bias, "output_bias": bias, "qk_norm": QKNorm(), "windows": sliding_windows(config)}


FAMILIES.register("qwen3")(
    Family(
        "Qwen3ForCausalLM",
        _differences,
        QWEN3_TENSOR_PLAN,
        {"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    )
)

ARCHITECTURES.register("qwen3")(
    Architecture("qwen3", "Qwen3ForCausalLM", {**PRE_NORM, **QK_NORMS}, settings=attention_bias)
)
