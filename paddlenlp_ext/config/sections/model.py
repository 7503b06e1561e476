"""Which model, and how it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.config.schema import option

BLOCKWISE_ALGORITHMS = ("nf4", "fp4")
QUANTIZE_ALGORITHMS = ("weight_only_int8", "weight_only_int4", *BLOCKWISE_ALGORITHMS, "llm.int8", "a8w8")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`config.model`."""

    model_name_or_path: str | None = option(None, help="folder, .gguf file, built-in name or hub id of the model")
    tokenizer_name_or_path: str | None = option(None, help="where the tokenizer is, if not beside the model")
    continue_training: bool = option(True, help="false: weights drawn at random from the model's config")
    use_flash_attention: bool = option(False, aliases=("flash_attention",), help="FlashAttention kernels on GPUs")
    flash_mask: bool = option(False, aliases=("flashmask",), help="FlashMask: packed rows without a dense mask")
    weight_quantize_algo: str | Mapping[str, Any] | None = option(
        None,
        choices=QUANTIZE_ALGORITHMS,
        help="store the frozen base weights in few bits (QLoRA); an object sets layers by pattern, null keeps them",
    )
    weight_blocksize: int = option(
        64, minimum=2, aliases=("qlora_weight_blocksize",), help="numbers that share a scale in nf4 and fp4"
    )
    weight_double_quant: bool = option(
        False, aliases=("qlora_weight_double_quant",), help="quantize the scales of nf4 and fp4 too"
    )
    weight_double_quant_block_size: int = option(
        256, minimum=2, aliases=("qlora_weight_double_quant_block_size",), help="scales that share a second scale"
    )
    use_long_sequence_strategies: bool = option(False, help="stretch the rotary embedding for longer texts")
    strategy_type: str | None = option(
        None, choices=("embedding_strategies", "attention_strategies"), help="kind of long-sequence strategy"
    )
    strategy_name: str | None = option(
        None,
        choices=(
            "RotaryEmbedding",
            "LinearScalingRotaryEmbedding",
            "NTKScalingRotaryEmbedding",
            "DynamicNTKScalingRotaryEmbedding",
            "YaRNScalingRotaryEmbedding",
            "AttentionWithLinearBias",
        ),
        help="the long-sequence strategy",
    )
    rope_scaling_factor: float = option(1.0, above=0, help="how many times longer than the model was made for")
