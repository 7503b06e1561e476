"""Qwen 1 (7B, 14B, 72B, 1.8B): Llama with biases of q, k and v, and other tensor names in files. arXiv:2309.16609.

Beyond `seq_length`, published models scale queries (`use_logn_attn`) and rotary frequencies (`use_dynamic_ntk`) in
inference, but not in training. This package implements neither scaling, so the context of a model is `seq_length`, and
longer generation is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.renamed_tensors import RenamedTensors
from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, Architecture, Key, count, number
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import full_attention

_LAYER, _STORED_LAYER = "model.layers.*", "transformer.h.*"
_FILES = RenamedTensors(
    {
        "model.embed_tokens": "transformer.wte",
        "model.norm": "transformer.ln_f",
        f"{_LAYER}.input_layernorm": f"{_STORED_LAYER}.ln_1",
        f"{_LAYER}.post_attention_layernorm": f"{_STORED_LAYER}.ln_2",
        f"{_LAYER}.self_attn": f"{_STORED_LAYER}.attn",
        f"{_LAYER}.self_attn.o_proj": f"{_STORED_LAYER}.attn.c_proj",
        f"{_LAYER}.mlp.up_proj": f"{_STORED_LAYER}.mlp.w1",
        f"{_LAYER}.mlp.gate_proj": f"{_STORED_LAYER}.mlp.w2",
        f"{_LAYER}.mlp.down_proj": f"{_STORED_LAYER}.mlp.c_proj",
    }
)
_KEYS = {
    "head_dim": "kv_channels",
    "max_position_embeddings": "seq_length",
    "partial_rotary_factor": "rotary_pct",
    "rms_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}
"""Keys of this family in config.json, by common key."""
_KEYS_OF_STRATEGIES = frozenset({"max_position_embeddings", "rope_theta"})
"""Keys that a long-sequence strategy sets. Qwen 1 lacks `rope_theta` and does not use `max_position_embeddings`."""
_LONGEST = "longest_answer"
"""Key that `_complete` adds: the sequence length up to which the model needs no scaling."""
_GATE_AND_UP = "gate_and_up_size"
"""Key that `_complete` adds: the sum of the output sizes of gate and up. GGUF files store this sum."""


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    common = {key: config[own] for key, own in _KEYS.items() if config.get(own) is not None}
    is_extended = any(config.get(key) for key in ("rope_scaling", "rope_parameters", "rope_theta"))
    if is_extended:  # a long-sequence strategy has set the common keys
        common = {key: common[key] for key in common if config.get(key) is None or key not in _KEYS_OF_STRATEGIES}
    # `intermediate_size` in files is the sum of the output sizes of gate and up.
    outputs = config["intermediate_size"]
    return {
        **config,
        **common,
        _GATE_AND_UP: outputs,
        "intermediate_size": outputs // 2,
        _LONGEST: None if is_extended else config.get("seq_length"),
    }


def _differences(config: ConfigReader) -> dict[str, Any]:
    for key in ("attn_dropout_prob", "emb_dropout_prob"):
        if config.value(key):
            raise ValueError(f"{key} {config.value(key)!r} in config.json is not supported for qwen; set it to 0.0")
    bias = not config.value("no_bias")
    scales_longer = config.value("use_logn_attn") or config.value("use_dynamic_ntk")
    return {
        "qkv_bias": True,
        "output_bias": bias,
        "mlp_bias": bias,
        "windows": full_attention(config),
        "longest_answer": config.value(_LONGEST) if scales_longer else None,
        "file_layout": _FILES,
    }


FAMILIES.register("qwen")(
    Family(
        "QWenLMHeadModel",
        _differences,
        DECODER_TENSOR_PLAN,
        {"no_bias": True, "use_logn_attn": True, "use_dynamic_ntk": True},
        complete=_complete,
        fused_layers={"c_attn": ("q_proj", "k_proj", "v_proj")},
        classifier="QWenForSequenceClassification",
    )
)


def _gguf_settings(file: GgufFile) -> dict[str, Any]:
    return {
        "kv_channels": count(file, "embedding_length") // count(file, "attention.head_count"),
        "seq_length": count(file, "context_length"),
        "rotary_emb_base": number(file, "rope.freq_base", 10000.0),
        "no_bias": True,
    }


ARCHITECTURES.register("qwen")(
    Architecture(
        "qwen",
        "QWenLMHeadModel",
        {**PRE_NORM, "attn_qkv": "self_attn.c_attn"},
        keys={_GATE_AND_UP: Key("feed_forward_length")},
        settings=_gguf_settings,
        norm_epsilon=("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
        restore=_FILES.stored,
        split=lambda tensors, config: {_FILES.name_in_memory(name): tensor for name, tensor in tensors.items()},
    )
)
