"""`BitsAndBytesConfig`, with the arguments of the class of the same name in transformers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.quantization.config import QuantizationConfig

_4BIT_TYPES = ("nf4", "fp4")


@dataclass(kw_only=True)
class BitsAndBytesConfig:
    """Quantization of the linear layers, with the arguments of `transformers.BitsAndBytesConfig`.

    Weights in 4 bits have the same format as in bitsandbytes. Weights in 8 bits have one scale per output feature, and
    activations stay in floating point. The lm_head is never quantized.

    Args:
        load_in_8bit: quantize the weights to 8 bits.
        load_in_4bit: quantize the weights to 4 bits.
        llm_int8_threshold: only the default is accepted, because activations are not quantized.
        llm_int8_skip_modules: names of modules whose linear layers stay in full precision.
        llm_int8_enable_fp32_cpu_offload, llm_int8_has_fp16_weight: not supported.
        bnb_4bit_compute_dtype: dtype of activations and unquantized weights; None: the `dtype` of `from_pretrained`.
        bnb_4bit_quant_type: "nf4" or "fp4".
        bnb_4bit_use_double_quant: store the scales in 8 bits.
        bnb_4bit_quant_storage: "uint8" or None.

    Raises:
        ValueError: both or neither of `load_in_4bit` and `load_in_8bit` are set, or an argument is not supported.

    Example:
        >>> from paddlenlp_ext import BitsAndBytesConfig
        >>> config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
        >>> config.to_quantization_config().describe()
        'nf4, blocks of 64, their scales quantized in groups of 256'
    """

    load_in_8bit: bool = False
    load_in_4bit: bool = False
    llm_int8_threshold: float = 6.0
    llm_int8_skip_modules: Sequence[str] | None = None
    llm_int8_enable_fp32_cpu_offload: bool = False
    llm_int8_has_fp16_weight: bool = False
    bnb_4bit_compute_dtype: Any = None
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_quant_storage: Any = None

    def __post_init__(self) -> None:
        if self.load_in_4bit == self.load_in_8bit:
            raise ValueError("BitsAndBytesConfig: set exactly one of load_in_4bit and load_in_8bit to True")
        storage = self.bnb_4bit_quant_storage
        rules = (
            ("llm_int8_threshold", self.llm_int8_threshold == 6.0, "activations are not quantized; use the default"),
            ("llm_int8_enable_fp32_cpu_offload", not self.llm_int8_enable_fp32_cpu_offload, "it must be False"),
            ("llm_int8_has_fp16_weight", not self.llm_int8_has_fp16_weight, "it must be False"),
            ("bnb_4bit_quant_type", self.bnb_4bit_quant_type in _4BIT_TYPES, "it must be nf4 or fp4"),
            ("bnb_4bit_quant_storage", storage is None or dtype_name(storage) == "uint8", "it must be uint8 or None"),
        )
        for name, holds, remedy in rules:
            if not holds:
                raise ValueError(f"BitsAndBytesConfig: {name}={getattr(self, name)!r} is not supported; {remedy}")

    @property
    def compute_dtype(self) -> str | None:
        """Name of `bnb_4bit_compute_dtype`; None if it is unset or the weights are in 8 bits."""
        given = self.bnb_4bit_compute_dtype
        return None if given is None or self.load_in_8bit else dtype_name(given)

    def to_quantization_config(self) -> QuantizationConfig:
        """Convert to this package's quantization options."""
        algo = self.bnb_4bit_quant_type if self.load_in_4bit else "weight_only_int8"
        double_quant = self.load_in_4bit and self.bnb_4bit_use_double_quant
        skipped = [name for name in self.llm_int8_skip_modules or () if name != "lm_head"]
        if not skipped:
            return QuantizationConfig(algo=algo, double_quant=double_quant)
        patterns = dict.fromkeys((rf"(.*\.)?{re.escape(name)}(\..*)?" for name in skipped), None)
        return QuantizationConfig(algo={**patterns, ".*": algo}, double_quant=double_quant)


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype, such as "bfloat16" for "bfloat16", `paddle.bfloat16` or `torch.bfloat16`."""
    return str(dtype).rpartition(".")[2]
