"""ERNIE 4.5, dense: Llama with interleaved RoPE. Baidu 2025, ERNIE 4.5 Technical Report."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, Architecture, has_bias
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import full_attention


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
        DECODER_TENSOR_PLAN,
        {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True},
    )
)

ARCHITECTURES.register("ernie4_5")(
    Architecture(
        "ernie4_5", "Ernie4_5ForCausalLM", PRE_NORM, settings=lambda file: {"use_bias": has_bias(file, "attn_q")}
    )
)
