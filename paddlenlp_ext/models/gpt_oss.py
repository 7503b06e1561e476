"""gpt-oss: experts with biases and a clamped gate, sinks of attention. OpenAI 2025, arXiv:2508.10925."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.interleaved_experts import InterleavedExperts
from paddlenlp_ext.models.expert_layers import expert_differences
from paddlenlp_ext.models.llama import LLAMA_TENSOR_PLAN
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family, windows_by_type
from paddlenlp_ext.nn.experts import ClampedGate, ExpertShape
from paddlenlp_ext.nn.routers import RouterOptions

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _differences(config: ConfigReader) -> dict[str, Any]:
    bias, layers = bool(config.value("attention_bias")), range(config.size("num_hidden_layers"))
    shape = ExpertShape(
        num_experts=config.size("num_local_experts"),
        intermediate_size=config.size("intermediate_size"),
        router=RouterOptions(kind="softmax_of_chosen", top_k=config.size("num_experts_per_tok"), bias=True),
        router_name="router",
        clamp=ClampedGate(float(config.value("swiglu_alpha")), float(config.value("swiglu_limit"))),
        bias=True,
    )
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "attention_sinks": True,
        "windows": windows_by_type(config, ["full_attention" if i % 2 else "sliding_attention" for i in layers]),
        **expert_differences(config, LLAMA_TENSOR_PLAN, shape, file_layout=InterleavedExperts()),
    }


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with gpt-oss's rotary scaling, where it has no settings."""
    has_settings = config.get("rope_parameters") or config.get("rope_scaling")
    return config if has_settings else {**config, "rope_scaling": _YARN}


FAMILIES.register("gpt_oss")(
    Family(
        "GptOssForCausalLM",
        _differences,
        LLAMA_TENSOR_PLAN,
        {
            "attention_bias": True,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "num_experts_per_tok": 4,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "router_aux_loss_coef": 0.001,
            "sliding_window": 128,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        complete=_complete,
    )
)
