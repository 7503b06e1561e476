"""Arcee AFM: Llama with a squared ReLU feed-forward without a gate. Arcee AI 2025."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, Architecture, attention_bias, has_bias
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import full_attention
from paddlenlp_ext.sharding_spec import TensorPlan

UNGATED_TENSOR_PLAN: TensorPlan = {
    name: style for name, style in DECODER_TENSOR_PLAN.items() if not name.endswith(".gate_proj")
}


def _differences(config: ConfigReader) -> dict[str, Any]:
    bias = bool(config.value("attention_bias"))
    return {"qkv_bias": bias, "output_bias": bias, "windows": full_attention(config)}


FAMILIES.register("arcee")(
    Family(
        "ArceeForCausalLM",
        _differences,
        UNGATED_TENSOR_PLAN,
        {"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        gated=False,
    )
)

ARCHITECTURES.register("arcee")(
    Architecture(
        "arcee",
        "ArceeForCausalLM",
        {stored: name for stored, name in PRE_NORM.items() if stored != "ffn_gate"},
        constants={"hidden_act": "relu2"},
        settings=lambda file: {**attention_bias(file), "mlp_bias": has_bias(file, "ffn_up")},
        permutes=True,
    )
)
