"""compressed-tensors checkpoints, format `pack-quantized`: int32 words hold codes of consecutive inputs of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.quantized_formats.base import (
    IntegerMatrix,
    PackedLayout,
    unsupported,
    whole_option,
)
from paddlenlp_ext.checkpoint.quantized_formats.int32_packing import pack_words, unpack_words
from paddlenlp_ext.checkpoint.weight_source import WeightSource


class CompressedTensorsLayout(PackedLayout):
    """Format `pack-quantized` of compressed-tensors, which transformers and vLLM can load."""

    method, marker = "compressed-tensors", ".weight_packed"
    parts = (".weight_scale", ".weight_shape", ".weight_zero_point")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> PackedLayout:
        groups = list((config.get("config_groups") or {}).values())
        if len(groups) != 1 or config.get("format") != "pack-quantized":
            raise unsupported(cls.method, f"{len(groups)} groups in the format {config.get('format')!r}")
        weights = groups[0].get("weights") or {}
        if weights.get("type") != "int" or groups[0].get("input_activations") is not None:
            raise unsupported(cls.method, "quantized activations, or weights that are not integers")
        group = weights.get("group_size")
        return CompressedTensorsLayout(
            bits=whole_option(weights, "num_bits"),
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
