"""LFM2: gated short convolutions in most layers, attention in the others. Liquid AI 2025, arXiv:2511.23404."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.renamed_tensors import RenamedTensors
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.checkpoint.gguf.short_convolutions import convolution_architecture
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import full_attention
from paddlenlp_ext.nn.attention import QKNorm
from paddlenlp_ext.nn.short_convolution import ConvolutionShape, ShortConvolution
from paddlenlp_ext.sharding_spec import TensorPlan

_LAYER = "model.layers.*"
LFM2_FILES = RenamedTensors(
    {
        "model.norm": "model.embedding_norm",
        f"{_LAYER}.self_attn.o_proj": f"{_LAYER}.self_attn.out_proj",
        f"{_LAYER}.conv.o_proj": f"{_LAYER}.conv.out_proj",
        f"{_LAYER}.mlp": f"{_LAYER}.feed_forward",
        f"{_LAYER}.mlp.gate_proj": f"{_LAYER}.feed_forward.w1",
        f"{_LAYER}.mlp.up_proj": f"{_LAYER}.feed_forward.w3",
        f"{_LAYER}.mlp.down_proj": f"{_LAYER}.feed_forward.w2",
    },
    in_adapters=True,
)
LFM2_TENSOR_PLAN: TensorPlan = {
    **DECODER_TENSOR_PLAN,
    "model.layers.*.self_attn.q_layernorm": "replicated",
    "model.layers.*.self_attn.k_layernorm": "replicated",
    "model.layers.*.conv.b_proj": "colwise",
    "model.layers.*.conv.c_proj": "colwise",
    "model.layers.*.conv.u_proj": "colwise",
    "model.layers.*.conv.o_proj": "rowwise",
}


LFM2_DEFAULTS: dict[str, Any] = {
    "conv_L_cache": 3,
    "conv_bias": False,
    "max_position_embeddings": 128_000,
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000.0,
}


def complete_lfm2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the keys of the published models with the common keys."""
    layers, attention = range(config["num_hidden_layers"]), config.get("full_attn_idxs")
    types = config.get("layer_types") or [
        "full_attention" if attention is None or layer in attention else "conv" for layer in layers
    ]
    tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
    return {
        **config,
        "layer_types": types,
        "rms_norm_eps": config.get("norm_eps") or 1e-5,
        "tie_word_embeddings": True if tied is None else tied,
    }


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Compute the width of the feed-forward, and replace the keys of the published models."""
    width = config.get("block_ff_dim") or config.get("intermediate_size") or 12288
    if config.get("block_auto_adjust_ff_dim", True):
        width = int(2 * width / 3)
        factor, multiple = config.get("block_ffn_dim_multiplier", 1.0), config.get("block_multiple_of") or 256
        if factor is not None:
            width = -(-int(factor * width) // multiple) * multiple
    return {**complete_lfm2(config), "intermediate_size": width}


def lfm2_differences(config: ConfigReader) -> dict[str, Any]:
    """Return the differences from the common decoder, for a model without experts.

    Raises:
        ValueError: `layer_types` has an unknown entry, or its length is not the number of layers.
    """
    layers, types = config.size("num_hidden_layers"), config.value("layer_types")
    unknown = sorted({*types} - {"full_attention", "conv"})
    if unknown or len(types) != layers:
        raise ValueError(
            f"layer_types in config.json must be full_attention or conv for each of the {layers} layers, got "
            f"{len(types)} entries: {', '.join(sorted({*types}))}"
        )
    shape = ConvolutionShape(config.size("hidden_size"), config.size("conv_L_cache"), bool(config.value("conv_bias")))
    return {
        "mixers": tuple(shape if kind == "conv" else None for kind in types),
        "file_layout": LFM2_FILES,
        "pre_norms": ("operator_norm", "ffn_norm"),
        "qk_norm": QKNorm(("q_layernorm", "k_layernorm")),
        "windows": full_attention(config),
    }


FAMILIES.register("lfm2")(
    Family(
        "Lfm2ForCausalLM",
        lfm2_differences,
        LFM2_TENSOR_PLAN,
        {**LFM2_DEFAULTS, "intermediate_size": 12288},
        complete=_complete,
        fused_layers={"in_proj": ShortConvolution.input_names},
    )
)

ARCHITECTURES.register("lfm2")(
    convolution_architecture("lfm2", "Lfm2ForCausalLM", constants={"block_auto_adjust_ff_dim": False})
)
