"""GPTQ checkpoints of AutoGPTQ and GPTQModel: int32 words hold codes of consecutive inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

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


class GPTQLayout(PackedLayout):
    """Format of AutoGPTQ and GPTQModel, which stores zero points minus 1."""

    method, marker, parts = "gptq", ".qweight", (".qzeros", ".scales", ".g_idx")
    stored_minus: ClassVar[int] = 1

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> PackedLayout:
        group, version = whole_option(config, "group_size"), str(config.get("checkpoint_format") or "").lower()
        layouts = {"": GPTQLayout, "gptq": GPTQLayout, "gptq_v2": GPTQv2Layout}
        if version not in layouts:
            raise unsupported(cls.method, f"its version {version!r}")
        return layouts[version](
            bits=whole_option(config, "bits"),
            group_size=None if group <= 0 else group,
            symmetric=config.get("sym") is not False,
        )

    def shape(self, source: WeightSource, layer: str) -> tuple[int, int]:
        words, outputs = source.shape(f"{layer}.qweight")
        return outputs, words * 32 // self.bits

    def codes(self, source: WeightSource, layer: str) -> np.ndarray:
        _, inputs = self.shape(source, layer)
        return unpack_words(source.read(f"{layer}.qweight").T, self.bits, inputs)

    def zeros(self, source: WeightSource, layer: str) -> np.ndarray:
        outputs, _ = self.shape(source, layer)
        stored = unpack_words(source.read(f"{layer}.qzeros"), self.bits, outputs)
        return stored.T.astype(np.int16) + np.int16(self.stored_minus)

    def groups(self, source: WeightSource, layer: str) -> np.ndarray | None:
        try:
            return source.read(f"{layer}.g_idx")
        except KeyError:
            return None

    def tensors(self, layer: str, matrix: IntegerMatrix) -> dict[str, np.ndarray]:
        outputs, inputs = matrix.codes.shape
        for size, what in ((outputs, "outputs"), (inputs, "inputs")):
            check_multiple(layer, size, 32 // self.bits, what, self.method)
        stored_zeros = ((matrix.zeros.T.astype(np.int16) - self.stored_minus) % (1 << self.bits)).astype(np.uint8)
        return {
            f"{layer}.qweight": np.ascontiguousarray(pack_words(matrix.codes, self.bits).T),
            f"{layer}.qzeros": pack_words(stored_zeros, self.bits),
            f"{layer}.scales": np.ascontiguousarray(matrix.scales.T),
            f"{layer}.g_idx": np.arange(inputs, dtype=np.int32) // (self.group_size or inputs),
        }

    def options(self, skipped: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": self.method,
            "checkpoint_format": "gptq",
            "bits": self.bits,
            "group_size": self.group_size or -1,
            "sym": self.symmetric,
            "desc_act": False,
            "lm_head": False,
            "dynamic": {f"-:{name.replace('.', '[.]')}": {} for name in skipped},
        }


class GPTQv2Layout(GPTQLayout):
    """Read-only format `gptq_v2` of GPTQModel, which stores zero points without an offset."""

    stored_minus = 0
