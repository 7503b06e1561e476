"""Read and write `quantization_config` in config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.quantized_formats.float8 import is_float8
from paddlenlp_ext.checkpoint.quantized_formats.mxfp4 import MXFP4_METHOD
from paddlenlp_ext.checkpoint.quantized_formats.registry import read_layout
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantizable_layers, quantized_layers
from paddlenlp_ext.quantization.quantized_linear import QuantizedLinear

_OURS = "paddlenlp_ext"
"""`quant_method` of formats that only this package reads, and key of this package's options in every file."""
_BITSANDBYTES_FORMATS = frozenset({"nf4", "fp4"})
_BITSANDBYTES_BLOCKS = frozenset(2**power for power in range(5, 13))
"""Block sizes that bitsandbytes supports, 32 to 4096. Double quantization requires at least 64 scales per group."""


def with_quantization(config: Mapping[str, Any], model: TrainableModel, dtype: str) -> dict[str, Any]:
    """Return the keys of config.json, with a `quantization_config` for the model's quantized layers.

    Args:
        config: content of config.json; an existing `quantization_config` is replaced.
        model: the model; `model.quantization` describes its quantized layers.
        dtype: compute dtype to record for other programs.
    """
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    layers = quantized_layers(model).values()
    algos = {layer.algo for layer in layers}
    if not algos:
        return plain
    fields: dict[str, Any] = {_OURS: options_to_dict(model.quantization)}
    # bitsandbytes quantizes only linear layers. In transformers 5, experts are stacked weights.
    is_linear = all(isinstance(layer, QuantizedLinear) for layer in layers)
    is_known = len(algos) == 1 and algos <= _BITSANDBYTES_FORMATS and _in_blocks_of_bitsandbytes(model.quantization)
    if is_linear and is_known:
        fields |= {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": algos.pop(),
            "bnb_4bit_use_double_quant": model.quantization.double_quant,
            "bnb_4bit_compute_dtype": dtype,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": ["lm_head", *_linears(model)],
        }
    else:
        fields["quant_method"] = _OURS
    return {**plain, "quantization_config": fields}


def _linears(model: TrainableModel) -> list[str]:
    return [name for name, layer in quantizable_layers(model).items() if isinstance(layer, Linear)]


def _in_blocks_of_bitsandbytes(options: QuantizationConfig) -> bool:
    groups_fit = not options.double_quant or options.double_quant_block_size in _BITSANDBYTES_BLOCKS - {32}
    return options.block_size in _BITSANDBYTES_BLOCKS and groups_fit


def from_quantization_config(config: Mapping[str, Any] | None) -> QuantizationConfig | None:
    """Return the quantization options in `config`, the value of `quantization_config` in config.json.

    The result is None for unquantized weights, and for weights that are dequantized when they are read (MXFP4, fp8).

    Raises:
        ValueError: the quantization method is not supported, or an option is invalid.
    """
    if not config or config.get("quant_method") == MXFP4_METHOD or is_float8(config):
        return None
    if _OURS in config:
        return options_from_dict(config[_OURS])
    layout = read_layout(config)
    if layout is not None:
        return QuantizationConfig(algo=f"weight_only_int{layout.bits}", group_size=layout.group_size)
    if config.get("quant_method") != "bitsandbytes" or not config.get("load_in_4bit"):
        raise ValueError(
            f"quantization_config in config.json: weights quantized by {config.get('quant_method')!r} are not "
            "supported; known: bitsandbytes in 4 bits, gptq, awq, auto-round, compressed-tensors, fp8, mxfp4, "
            "paddlenlp_ext; start from the original model"
        )
    return QuantizationConfig(
        algo=config.get("bnb_4bit_quant_type", "fp4"), double_quant=bool(config.get("bnb_4bit_use_double_quant"))
    )


def options_to_dict(options: QuantizationConfig) -> dict[str, Any]:
    """Return the quantization options as a JSON-serializable dict."""
    fields = dataclasses.asdict(options)
    return {**fields, "algo": options.algo if isinstance(options.algo, str) else dict(options.algo)}


def options_from_dict(fields: Mapping[str, Any]) -> QuantizationConfig:
    """Build the quantization options from the result of `options_to_dict`.

    Raises:
        ValueError: a key is unknown, `algo` is missing, or a value is out of range.
    """
    known = {field.name for field in dataclasses.fields(QuantizationConfig)}
    if "algo" not in fields or not known >= fields.keys():
        raise ValueError(
            f"quantization options {dict(fields)} have unknown keys or no algo; known: {', '.join(sorted(known))}"
        )
    return QuantizationConfig(**fields)
