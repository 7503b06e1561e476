"""compressed-tensors checkpoints of integer weights, which llm-compressor writes.

| format | weights |
| --- | --- |
| `pack-quantized` | int32 words hold codes of consecutive inputs of a row |
| `int-quantized` (W8A8) | signed codes, int8 [out, in] |

FP8 weights are dequantized by float8.py. The quantization of activations is not simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.quantized_formats.int32_packing import pack_words, unpack_words
from paddlenlp_ext.checkpoint.quantized_formats.packed_layout import (
    IntegerMatrix,
    PackedLayout,
    mapping_option,
    whole_option,
)
from paddlenlp_ext.checkpoint.quantized_formats.supported_formats import unsupported
from paddlenlp_ext.checkpoint.weight_source import WeightSource

COMPRESSED_TENSORS = "compressed-tensors"
"""Value of `quant_method` in config.json."""
_OTHER_STEPS = ("sparsity_config", "transform_config")


def weight_options(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of the quantized weights.

    Args:
        config: `quantization_config` of config.json.

    Raises:
        ValueError: `config_groups` does not have exactly one group, or the weights are sparse or rotated.
    """
    groups = mapping_option(config, "config_groups")
    if len(groups) != 1:
        raise unsupported(COMPRESSED_TENSORS, f"{len(groups)} groups of layers in config_groups")
    for key in _OTHER_STEPS:
        step = mapping_option(config, key)
        if step.get("format", "dense") != "dense" or step.get("config_groups"):
            raise unsupported(COMPRESSED_TENSORS, f"a {key}")
    return mapping_option(mapping_option(groups, next(iter(groups))), "weights")


class CompressedTensorsLayout(PackedLayout):
    """Format `pack-quantized` of compressed-tensors, which transformers and vLLM can load."""

    method, marker = COMPRESSED_TENSORS, ".weight_packed"
    parts = (".weight_scale", ".weight_shape", ".weight_zero_point")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> PackedLayout:
        weights, form = weight_options(config), str(config.get("format"))
        layouts = {
            "pack-quantized": CompressedTensorsLayout,
            "int-quantized": CompressedIntegersLayout,
            "naive-quantized": CompressedIntegersLayout,
        }
        if form not in layouts or weights.get("type") != "int":
            raise unsupported(cls.method, f"weights of type {weights.get('type')!r} in the format {form!r}")
        group, bits = weights.get("group_size"), whole_option(weights, "num_bits")
        return layouts[form](
            bits=bits if form == "pack-quantized" else 8,
            group_size=group if isinstance(group, int) and group > 0 else None,
            symmetric=weights.get("symmetric") is not False,
        )

    def shape(self, source: WeightSource, layer: str) -> tuple[int, int]:
        outputs, inputs = source.read(f"{layer}.weight_shape")
        return int(outputs), int(inputs)

    def codes(self, source: WeightSource, layer: str) -> np.ndarray:
        _, inputs = self.shape(source, layer)
        return unpack_words(source.read(f"{layer}.weight_packed"), self.bits, inputs)

    def scales(self, source: WeightSource, layer: str, dtype: str) -> np.ndarray:
        return source.read(self.scale_name(layer), dtype)

    def scale_name(self, layer: str) -> str:
        return f"{layer}.weight_scale"

    def required(self, layer: str) -> set[str]:
        return {*super().required(layer), f"{layer}.weight_shape"}

    def zeros(self, source: WeightSource, layer: str) -> np.ndarray:
        outputs, _ = self.shape(source, layer)
        try:
            words = source.read(f"{layer}.weight_zero_point")
        except KeyError:
            return np.full(source.shape(self.scale_name(layer)), self.middle, np.int16)
        return unpack_words(words.T, self.bits, outputs).T.astype(np.int16)

    def tensors(self, layer: str, matrix: IntegerMatrix) -> dict[str, np.ndarray]:
        written = {
            f"{layer}.weight_packed": pack_words(matrix.codes, self.bits),
            f"{layer}.weight_scale": matrix.scales,
            f"{layer}.weight_shape": np.array(matrix.codes.shape, np.int64),
        }
        if not self.symmetric:
            zeros = pack_words(matrix.zeros.T.astype(np.uint8), self.bits).T
            written[f"{layer}.weight_zero_point"] = np.ascontiguousarray(zeros)
        return written

    def options(self, skipped: Sequence[str]) -> dict[str, Any]:
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "group" if self.group_size else "channel",
            "group_size": self.group_size,
            "dynamic": False,
            "actorder": None,
            "observer": "minmax",
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": self.method,
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", *skipped],
        }


class CompressedIntegersLayout(CompressedTensorsLayout):
    """Read-only format `int-quantized`: signed codes of at most 8 bits, one in each byte."""

    marker = ".weight_scale"
    parts = (".weight", ".weight_zero_point", ".input_scale", ".input_zero_point")

    def shape(self, source: WeightSource, layer: str) -> tuple[int, int]:
        outputs, inputs = source.shape(f"{layer}.weight")
        return outputs, inputs

    def required(self, layer: str) -> set[str]:
        return {f"{layer}.weight", self.scale_name(layer)}

    def codes(self, source: WeightSource, layer: str) -> np.ndarray:
        return self._unsigned(source, f"{layer}.weight").astype(np.uint8)

    def zeros(self, source: WeightSource, layer: str) -> np.ndarray:
        try:
            return self._unsigned(source, f"{layer}.weight_zero_point")
        except KeyError:
            return np.full(source.shape(self.scale_name(layer)), self.middle, np.int16)

    def _unsigned(self, source: WeightSource, name: str) -> np.ndarray:
        if (dtype := source.dtype(name)) != "int8":
            raise ValueError(f"{source.path}: {name} is {dtype}, not int8; download or save the model again")
        return source.read(name).astype(np.int16) + np.int16(self.middle)
