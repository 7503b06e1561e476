"""Quantization options: the format of the weights, and the layers to quantize."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from paddlenlp_ext.config.sections.model import BLOCKWISE_ALGORITHMS
from paddlenlp_ext.utils.layer_name_patterns import matches, matching
from paddlenlp_ext.utils.suggest import did_you_mean

BLOCKWISE = BLOCKWISE_ALGORITHMS
ALGOS = (*BLOCKWISE, "weight_only_int8", "weight_only_int4")
_KEY = "weight_quantize_algo"


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Quantization of the linear layers, including experts.

    Attributes:
        algo: one of `ALGOS` for all layers, or a mapping from patterns to algos. A pattern is a layer's name, a name
            suffix, or a regular expression for the full name. A layer gets the algo of the first matching pattern. If
            no pattern matches, or the algo is None, the layer stays in full precision.
        block_size: number of weights that share a scale, for `BLOCKWISE` formats.
        double_quant: store the scales in 8 bits, for `BLOCKWISE` formats.
        double_quant_block_size: with `double_quant`, number of scales that share a second-level scale.
        group_size: number of consecutive inputs that share a scale, for weight_only_int4; None: one scale per row.

    Raises:
        ValueError: an algo is unknown, or a number is out of range.

    Examples:
        >>> from paddlenlp_ext import QuantizationConfig
        >>> QuantizationConfig(algo="nf4", double_quant=True).describe()
        'nf4, blocks of 64, their scales quantized in groups of 256'
    """

    algo: str | Mapping[str, str | None]
    block_size: int = 64
    double_quant: bool = False
    double_quant_block_size: int = 256
    group_size: int | None = None

    def __post_init__(self) -> None:
        for algo in self.algo.values() if isinstance(self.algo, Mapping) else (self.algo,):
            if algo is not None and algo not in ALGOS:
                hint = did_you_mean(str(algo), ALGOS)
                raise ValueError(f"{_KEY}={algo!r} is not known{hint} Known: {', '.join(ALGOS)}")
        for key, value in (
            ("qlora_weight_blocksize", self.block_size),
            ("qlora_weight_double_quant_block_size", self.double_quant_block_size),
            ("group_size", self.group_size),
        ):
            if value is not None and (value < 2 or value % 2):
                raise ValueError(f"{key}={value!r} is out of range; allowed: even numbers, at least 2")

    def describe(self) -> str:
        """Describe the format, for messages and model cards."""
        algos = [self.algo] if isinstance(self.algo, str) else list(self.algo.values())
        algo = self.algo if isinstance(self.algo, str) else ", ".join(f"{k}: {v}" for k, v in self.algo.items())
        if self.group_size is not None and "weight_only_int4" in algos:
            algo = f"{algo}, groups of {self.group_size}"
        if not set(algos) & set(BLOCKWISE):
            return algo
        double = f", their scales quantized in groups of {self.double_quant_block_size}" if self.double_quant else ""
        return f"{algo}, blocks of {self.block_size}{double}"

    def for_layer(self, name: str) -> QuantizationConfig | None:
        """Return the options of the layer `name`, with a single algo; None if the layer stays in full precision."""
        algo = self.algo
        if not isinstance(algo, str):
            algo = next((algo for pattern, algo in algo.items() if matches(pattern, name, _KEY)), None)
        if algo is None:
            return None
        return dataclasses.replace(self, algo=algo, double_quant=self.double_quant and algo in BLOCKWISE)

    def for_layers(self, names: Collection[str]) -> dict[str, QuantizationConfig]:
        """Return a dict from layer names to options, for the layers to quantize.

        Raises:
            ValueError: a pattern matches no name.
        """
        for pattern in self.algo if isinstance(self.algo, Mapping) else ():
            matching(pattern, names, _KEY)
        chosen = {name: self.for_layer(name) for name in names}
        return {name: options for name, options in chosen.items() if options is not None}


def describe_quantization(options: QuantizationConfig | None) -> str:
    """Describe the format of a model's weights, for messages."""
    return "full precision" if options is None else options.describe()
