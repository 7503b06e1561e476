"""gpt-oss: experts with biases and a clamped gate, attention sinks. OpenAI 2025, arXiv:2508.10925."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.interleaved_experts import InterleavedExperts
from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, Architecture, Key, attention_bias
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.interleaved_experts import STACKED_EXPERTS, InterleavedGates, split_gates
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.moe_config import expert_differences
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import windows_by_type
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
        **expert_differences(config, DECODER_TENSOR_PLAN, shape, file_layout=InterleavedExperts()),
    }


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config; if it has no rope settings, add the YaRN scaling of the published models."""
    has_settings = config.get("rope_parameters") or config.get("rope_scaling")
    return config if has_settings else {**config, "rope_scaling": _YARN}


FAMILIES.register("gpt_oss")(
    Family(
        "GptOssForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
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


def _gguf_settings(file: GgufFile) -> dict[str, Any]:
    """Return `attention_bias` for config.json, from the tensors of a GGUF file.

    Raises:
        ValueError: the rope scaling of the file is not YaRN.
    """
    scaling = file.get(file.architecture_key("rope.scaling.type"), str, "none")
    if scaling != "yarn":
        raise ValueError(
            f"{file.path}: {file.architecture} with rope scaling {scaling!r} is not supported; known: yarn"
        )
    return attention_bias(file)


ARCHITECTURES.register("gpt_oss")(
    Architecture(
        "gpt-oss",
        "GptOssForCausalLM",
        {
            **PRE_NORM,
            **STACKED_EXPERTS,
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        keys={
            "num_local_experts": Key("expert_count"),
            "num_experts_per_tok": Key("expert_used_count"),
            "intermediate_size": Key("expert_feed_forward_length"),
            "sliding_window": Key("attention.sliding_window"),
        },
        constants={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},  # llama.cpp hard-codes these values
        settings=_gguf_settings,
        has_experts=True,
        has_window=True,
        truncates_yarn=False,
        restore=InterleavedGates,
        split=split_gates,
    )
)
