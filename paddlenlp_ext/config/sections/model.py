"""Configuration section for the base model: weights, tokenizer, quantization, context extension."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.config.dataclass_options import OptionGroup, option

LONG_SEQUENCE_STRATEGIES: dict[str, dict[str, str]] = {
    "embedding_strategies": {
        "RotaryEmbedding": "default",
        "LinearScalingRotaryEmbedding": "linear",
        "NTKScalingRotaryEmbedding": "ntk",
        "DynamicNTKScalingRotaryEmbedding": "dynamic",
        "YaRNScalingRotaryEmbedding": "yarn",
        "LongRoPEScalingRotaryEmbedding": "longrope",
        "Llama3ScalingRotaryEmbedding": "llama3",
    },
    "attention_strategies": {"AttentionWithLinearBias": "alibi"},
}
"""strategy_type -> strategy_name -> short name."""
_MODULE = "paddlenlp.transformers.long_sequence_strategies"
STRATEGY_NAMES = tuple(name for names in LONG_SEQUENCE_STRATEGIES.values() for name in names)
TYPE_SPELLINGS = {f"{_MODULE}.{kind}": kind for kind in LONG_SEQUENCE_STRATEGIES}
"""PaddleNLP's module -> strategy_type."""
NAME_SPELLINGS = {
    spelling: name
    for kind, names in LONG_SEQUENCE_STRATEGIES.items()
    for name, short in names.items()
    for spelling in (short, f"{_MODULE}.{kind}.{name}")
}
"""Short name of a strategy, or its class path in PaddleNLP -> strategy_name."""
BLOCKWISE_ALGORITHMS = ("nf4", "fp4", "nf4_symmetric")
QUANTIZE_ALGORITHMS = ("weight_only_int8", "weight_only_int4", *BLOCKWISE_ALGORITHMS, "llm.int8", "a8w8")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(OptionGroup):
    """`config.model`: the base model, its tokenizer, quantization and context extension."""

    model_name_or_path: str | None = option(None, help="folder, .gguf file, built-in name or hub id of the model")
    tokenizer_name_or_path: str | None = option(
        None, help="folder or hub id of the tokenizer; unset: the tokenizer of the model"
    )
    add_tokens: tuple[str, ...] | None = option(
        None, help="tokens to add to the tokenizer; the new rows of embedding and lm_head are trained"
    )
    add_special_tokens: tuple[str, ...] | None = option(
        None, help="special tokens to add, such as chat markers; decoded answers omit special tokens"
    )
    resize_vocab: bool = option(False, help="extend embedding and lm_head to the vocabulary size of the tokenizer")
    resize_to_multiple_of: int | None = option(
        None, minimum=1, help="round the number of rows of embedding and lm_head up to a multiple of this value"
    )
    continue_training: bool = option(True, help="true: load the weights of the model; false: start from random weights")
    use_flash_attention: bool = option(
        False,
        aliases=("flash_attention",),
        help="on a GPU, use FlashMask or Triton kernels instead of blockwise attention in plain Paddle (docs/gpu.md); "
        "no effect on the CPU",
    )
    flash_mask: bool = option(
        False,
        aliases=("flashmask",),
        help="switch on zero_padding and use_flash_attention, which select FlashMask on a GPU; false has no effect",
    )
    weight_quantize_algo: str | Mapping[str, Any] | None = option(
        None,
        choices=QUANTIZE_ALGORITHMS,
        help="quantize the frozen base weights (QLoRA); an object maps layer patterns to formats (null: not quantized)",
    )
    weight_blocksize: int = option(
        64,
        minimum=2,
        aliases=("qlora_weight_blocksize",),
        help="nf4 and fp4 formats: number of weights that share a scale",
    )
    weight_double_quant: bool = option(
        False,
        aliases=("qlora_weight_double_quant",),
        help="nf4 and fp4 formats: quantize the scales too (double quantization)",
    )
    weight_double_quant_block_size: int = option(
        256,
        minimum=2,
        aliases=("qlora_weight_double_quant_block_size",),
        help="with double quantization: number of scales that share a second-level scale",
    )
    int8_training: bool = option(
        False,
        help="compute matmuls with the frozen base weights in 8-bit integers (docs/precision.md); needs an adapter "
        "and device: cpu; without weight_quantize_algo, the base weights are stored as weight_only_int8",
    )
    router_aux_loss_coef: float | None = option(
        None,
        minimum=0,
        help="coefficient of the load-balancing loss of MoE models; 0: off; unset: the value in config.json",
    )
    rslora_plus: bool = option(False, help="set rslora: true, lora_plus_scale: 4 and lora_alpha: 4")
    use_long_sequence_strategies: bool = option(
        False,
        help="extend the context length of the model with the strategy that strategy_name selects",
    )
    strategy_type: str | None = option(
        None,
        choices=tuple(LONG_SEQUENCE_STRATEGIES),
        synonyms=TYPE_SPELLINGS,
        help="kind of the long-sequence strategy; unset: derived from strategy_name",
    )
    strategy_name: str | None = option(
        None,
        choices=STRATEGY_NAMES,
        synonyms=NAME_SPELLINGS,
        help="long-sequence strategy; short names: default, linear, ntk, dynamic, yarn, longrope, llama3, alibi",
    )
    rope_scaling_factor: float = option(
        1.0, minimum=1, help="target context length divided by the trained context length"
    )
    strategy_parameters: dict[str, Any] | None = option(  # noqa: RUF009 (the default is null)
        None, help="further parameters of the strategy, with the keys of transformers' rope_parameters"
    )
