"""Seed-OSS: Llama with biases on q, k and v. ByteDance 2025.

The dropouts in config.json (`attention_dropout`, `residual_dropout`) are not applied.
"""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import PROJECTIONS, Architecture, has_bias
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import full_attention


def _differences(config: ConfigReader) -> dict[str, Any]:
    return {
        "qkv_bias": bool(config.value("attention_bias")),
        "output_bias": bool(config.value("attention_out_bias")),
        "windows": full_attention(config),
    }


FAMILIES.register("seed_oss")(
    Family(
        "SeedOssForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {
            "attention_bias": True,
            "attention_out_bias": False,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "num_key_value_heads": 8,
        },
    )
)

ARCHITECTURES.register("seed_oss")(
    Architecture(
        "seed_oss",
        "SeedOssForCausalLM",
        {**PROJECTIONS, "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
        settings=lambda file: {
            "attention_bias": has_bias(file, "attn_q"),
            "attention_out_bias": has_bias(file, "attn_output"),
            "mlp_bias": has_bias(file, "ffn_gate"),
        },
    )
)
