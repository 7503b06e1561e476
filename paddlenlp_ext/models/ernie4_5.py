"""ERNIE 4.5, dense: Llama with rotation of neighbouring channels. Baidu 2025, ERNIE 4.5 Technical Report."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.models.llama import LLAMA_TENSOR_PLAN
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family, full_attention


def _differences(config: ConfigReader) -> dict[str, Any]:
    bias = bool(config.value("use_bias"))
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
        "interleaved_rope": True,
        "windows": full_attention(config),
    }


FAMILIES.register("ernie4_5")(
    Family(
        "Ernie4_5ForCausalLM",
        _differences,
        LLAMA_TENSOR_PLAN,
        {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True},
    )
)
