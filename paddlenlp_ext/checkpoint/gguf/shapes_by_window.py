"""GGUF layout of decoders whose heads have other sizes in layers with full attention than in layers with windows.

The keys `key_length` and `freq_base` belong to layers with full attention, and the keys that end in `_swa` to layers
with windows. Layers with full attention may have no values (`attn_v`): their values are the keys before RoPE.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import (
    QK_NORMS,
    SANDWICH,
    TOP_LEVEL,
    Architecture,
    Key,
    count,
    counts_by_layer,
    kv_heads_by_layer,
    number,
    shortest_decimal,
)
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.moe_tensors import plain_softmax
from paddlenlp_ext.checkpoint.gguf.rope_scaling import rope_scaling, rope_theta

_LAYER_EMBEDDINGS = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_TOP_LEVEL = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_EXPERTS = {
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_KEYS = {
    "hidden_size_per_layer_input": Key("embedding_length_per_layer_input", default=0, minimum=0),
    "num_kv_shared_layers": Key("attention.shared_kv_layers", default=0, minimum=0),
}
_EXPERT_KEYS = {
    "num_experts": Key("expert_count"),
    "top_k_experts": Key("expert_used_count"),
    "moe_intermediate_size": Key("expert_feed_forward_length"),
}
_PATTERN, _SOFTCAP = "attention.sliding_window_pattern", "final_logit_softcapping"


def shapes_by_window_architecture(name: str, class_name: str) -> Architecture:
    """Return the GGUF layout of a family; see `Architecture` for the arguments."""
    dense = Architecture(
        name,
        class_name,
        {**SANDWICH, **QK_NORMS, **_LAYER_EMBEDDINGS, "layer_output_scale.weight": "layer_scalar"},
        top_level={**TOP_LEVEL, **_TOP_LEVEL},
        keys=_KEYS,
        constants={"attention_bias": False, "hidden_activation": "gelu_pytorch_tanh", "rope_scaling": None},
        settings=_settings,
        has_window=True,
        has_layer_shapes=True,
        stores_merges=True,
        unadapted=("per_layer_model_proj",),
        metadata=_metadata,
    )
    experts = replace(
        dense,
        in_block={**dense.in_block, **_EXPERTS},
        keys={**_KEYS, **_EXPERT_KEYS},
        constants={**dense.constants, "enable_moe_block": True},
        settings=lambda file: {**_settings(file), **plain_softmax(file)},
        has_experts=True,
        writes=lambda config: bool(config.experts),
    )
    return replace(dense, variants=(experts,))


def _settings(file: GgufFile) -> dict[str, Any]:
    """Return the keys of config.json that depend on the kind of a layer.

    Raises:
        ValueError: metadata are missing or damaged, or feed-forwards have widths that config.json cannot express.
    """
    has_window = file.require_list(file.architecture_key(_PATTERN), bool)
    heads, widths = kv_heads_by_layer(file), counts_by_layer(file, "feed_forward_length")
    first_reader = len(heads) - count(file, "attention.shared_kv_layers", 0, minimum=0)
    is_wide = widths[-1] == 2 * widths[0]
    if len(has_window) != len(heads) or widths != [
        widths[0] * (2 if is_wide and layer >= first_reader else 1) for layer in range(len(widths))
    ]:
        raise ValueError(
            f"{file.path}: {_PATTERN} and feed_forward_length do not match {len(heads)} layers whose last "
            f"{len(heads) - first_reader} layers share keys and values; the file is damaged"
        )
    full_dim = count(file, "attention.key_length")
    full = [layer for layer, window in enumerate(has_window) if not window]
    of_windows = [kv for kv, window in zip(heads, has_window, strict=True) if window]
    cap, table = file.get(file.architecture_key(_SOFTCAP), float), file.tensors.get("per_layer_token_embd.weight")
    return {
        "attention_k_eq_v": any(
            layer < first_reader and f"blk.{layer}.attn_v.weight" not in file.tensors for layer in full
        ),
        "final_logit_softcapping": None if cap is None else shortest_decimal(cap),
        "head_dim": count(file, "attention.key_length_swa", full_dim),
        "intermediate_size": widths[0],
        "layer_types": ["sliding_attention" if window else "full_attention" for window in has_window],
        "num_key_value_heads": max(of_windows or heads),
        "per_layer_config": {str(layer): {"head_dim": full_dim, "num_key_value_heads": heads[layer]} for layer in full},
        "rope_parameters": {
            "full_attention": {
                "rope_theta": rope_theta(file),
                **(rope_scaling(file, full_dim) or {"rope_type": "default"}),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": number(file, "rope.freq_base_swa", 10_000.0)},
        },
        "use_double_wide_mlp": is_wide,
        **({} if table is None else {"vocab_size_per_layer_input": table.shape[0]}),
    }


def _metadata(config: Any) -> dict[str, Any]:
    """Return the metadata that differ between layers with windows and layers with full attention.

    Raises:
        ValueError: llama.cpp would read the keys and values of other layers.
    """
    sources = [shape.source for shape in config.layer_shapes]
    first_reader = sources.count(None)
    for window, source in zip(config.windows[first_reader:], sources[first_reader:], strict=True):
        expected = first_reader - (1 if window is None else 2)
        if source != expected:
            raise ValueError(
                f"a GGUF file cannot express layers that read the keys and values of layer {source} "
                f"(num_kv_shared_layers): llama.cpp reads layer {expected}, which has another kind of attention"
            )
    layers = list(zip(config.layer_shapes, config.ropes, config.windows, strict=True))
    of_full, of_windows = (
        next(((shape, rope) for shape, rope, window in layers if (window is None) == is_full), layers[0][:2])
        for is_full in (True, False)
    )
    return {
        "attention.head_count_kv": _by_layer([shape.num_kv_heads for shape in config.layer_shapes]),
        "attention.key_length": of_full[0].head_dim,
        "attention.value_length": of_full[0].head_dim,
        "attention.key_length_swa": of_windows[0].head_dim,
        "attention.value_length_swa": of_windows[0].head_dim,
        _PATTERN: [window is not None for window in config.windows],
        "feed_forward_length": _by_layer([shape.intermediate_size for shape in config.layer_shapes]),
        "rope.dimension_count_swa": of_windows[1].rotary_dim,
        "rope.freq_base_swa": of_windows[1].theta,
        **({} if config.logit_softcap is None else {_SOFTCAP: config.logit_softcap}),
    }


def _by_layer(counts: list[int]) -> int | list[int]:
    """Return the number that all layers share, or the list of the numbers."""
    return counts[0] if len({*counts}) == 1 else counts
