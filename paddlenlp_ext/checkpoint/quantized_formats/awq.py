"""AWQ checkpoints of AutoAWQ, version `gemm`: int32 words hold codes of consecutive outputs in an interleaved order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.quantized_formats.int32_packing import pack_words, unpack_words
from paddlenlp_ext.checkpoint.quantized_formats.packed_layout import (
    IntegerMatrix,
    PackedLayout,
    check_multiple,
    whole_option,
)
from paddlenlp_ext.checkpoint.quantized_formats.supported_formats import unsupported
from paddlenlp_ext.checkpoint.weight_source import WeightSource

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class AWQLayout(PackedLayout):
    """Format of AutoAWQ, version `gemm`."""

    method, marker, parts = "awq", ".qweight", (".qzeros", ".scales")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> PackedLayout:
        bits, group = whole_option(config, "bits"), whole_option(config, "group_size")
        version = str(config.get("version") or "").lower()
        if version not in ("", "gemm"):
            raise unsupported(cls.method, f"its version {version!r}")
        if bits != 4:
            raise unsupported(cls.method, f"weights of {bits} bits")
        return AWQLayout(bits=bits, group_size=None if group <= 0 else group, symmetric=False)

    def shape(self, source: WeightSource, layer: str) -> tuple[int, int]:
        inputs, words = source.shape(f"{layer}.qweight")
        return words * 32 // self.bits, inputs

    def codes(self, source: WeightSource, layer: str) -> np.ndarray:
        return self._unpacked(source, f"{layer}.qweight", layer)

    def zeros(self, source: WeightSource, layer: str) -> np.ndarray:
        return self._unpacked(source, f"{layer}.qzeros", layer).astype(np.int16)

    def _unpacked(self, source: WeightSource, name: str, layer: str) -> np.ndarray:
        outputs, _ = self.shape(source, layer)
        return unpack_words(source.read(name), self.bits, outputs, _AWQ_ORDER).T

    def tensors(self, layer: str, matrix: IntegerMatrix) -> dict[str, np.ndarray]:
        check_multiple(layer, matrix.codes.shape[0], 32 // self.bits, "outputs", self.method)
        return {
            f"{layer}.qweight": pack_words(matrix.codes.T, self.bits, _AWQ_ORDER),
            f"{layer}.qzeros": pack_words(matrix.zeros.T.astype(np.uint8), self.bits, _AWQ_ORDER),
            f"{layer}.scales": np.ascontiguousarray(matrix.scales.T),
        }

    def options(self, skipped: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": self.method,
            "version": "gemm",
            "bits": self.bits,
            "group_size": self.group_size or -1,
            "zero_point": True,
            "modules_to_not_convert": list(skipped) or None,
        }
