"""Layouts of files with linear layers in 4 or 8 bits, by other programs: GPTQ, AWQ, compressed-tensors.

A weight is (code - zero) * scale, with a scale and a zero point for each group of inputs of a row.

| | GPTQ | AWQ | compressed-tensors, `pack-quantized` |
| --- | --- | --- | --- |
| codes | `qweight` [in / n, out] | `qweight` [in, out / n] | `weight_packed` [out, in / n] |
| scales | `scales` [groups, out] | `scales` [groups, out] | `weight_scale` [out, groups] |
| zeros | `qzeros` [groups, out / n], minus 1 | `qzeros` [groups, out / n] | `weight_zero_point` [out / n, groups] |
| others | `g_idx` [in], group of each input | | `weight_shape` [2] |

A word of 32 bits holds n = 32 / bits codes in ascending order; AWQ's order is 0, 2, 4, 6, 1, 3, 5, 7. Sources: the file
formats of AutoGPTQ, AutoAWQ (version `gemm`) and compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.checkpoint.word_packing import pack_words, unpack_words

INTEGER_PARTS = (".weight_scale", ".weight_shape", ".weight_zero", ".weight_order")
"""Ends of the names of this package's own tensors of an integer weight, besides its codes (quantization/storage.py)."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class IntegerMatrix:
    """Codes, scales and zero points of a linear layer.

    Attributes:
        codes: uint8 [out, in], from 0.
        scales: [out, groups].
        zeros: uint8 or int16 [out, groups], the code that stands for 0.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Base of the layouts.

    Attributes:
        method: `quant_method` in config.json.
        marker: end of the name of the tensor that holds the codes.
        parts: ends of the names of the other tensors.
        bits: 4 or 8.
        group_size: inputs that share a scale; None: all inputs of a row.
        symmetric: whether 0 is the middle code of every group; files that are read may say so and have others.
    """

    method: ClassVar[str]
    marker: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    bits: int
    group_size: int | None = None
    symmetric: bool = True

    @property
    def middle(self) -> int:
        """Code that stands for 0 in symmetric formats."""
        return 1 << (self.bits - 1)

    def shape(self, source: WeightSource, layer: str) -> tuple[int, int]:
        """Return (out, in) of a layer."""
        raise NotImplementedError

    def codes(self, source: WeightSource, layer: str) -> np.ndarray:
        """Return the codes of a layer, uint8 [out, in]."""
        raise NotImplementedError

    def scales(self, source: WeightSource, layer: str, dtype: str) -> np.ndarray:
        """Return the scales of a layer, [out, groups]."""
        return source.read(f"{layer}.scales", dtype).T

    def scale_name(self, layer: str) -> str:
        """Return the name of the tensor of a layer's scales."""
        return f"{layer}.scales"

    def zeros(self, source: WeightSource, layer: str) -> np.ndarray:
        """Return the codes of a layer that stand for 0, int16 [out, groups]."""
        raise NotImplementedError

    def groups(self, source: WeightSource, layer: str) -> np.ndarray | None:
        """Return the group of each input of a layer, int [in]; None if the inputs are grouped in their order."""
        return None

    def tensors(self, layer: str, matrix: IntegerMatrix) -> dict[str, np.ndarray]:
        """Return the tensors of a layer as they are written.

        Raises:
            ValueError: the layout cannot hold a matrix of this shape.
        """
        raise NotImplementedError

    def options(self, skipped: Sequence[str]) -> dict[str, Any]:
        """Return `quantization_config` of config.json; `skipped` are linear layers in full precision."""
        raise NotImplementedError


def _check_multiple(layer: str, size: int, of: int, what: str, layout: str) -> None:
    if size % of:
        raise ValueError(
            f"{layer} has {size} {what}, and the layout {layout} packs them by {of}; choose the layout "
            "compressed-tensors"
        )


class GPTQLayout(PackedLayout):
    """Layout of AutoGPTQ and GPTQModel. Zero points are stored minus 1, except in the version `gptq_v2`."""

    method, marker, parts = "gptq", ".qweight", (".qzeros", ".scales", ".g_idx")
    stored_minus: ClassVar[int] = 1

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
            _check_multiple(layer, size, 32 // self.bits, what, self.method)
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
    """GPTQModel's layout `gptq_v2`, which stores zero points as they are; it is only read."""

    stored_minus = 0


class AWQLayout(PackedLayout):
    """Layout of AutoAWQ, version `gemm`."""

    method, marker, parts = "awq", ".qweight", (".qzeros", ".scales")

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
        _check_multiple(layer, matrix.codes.shape[0], 32 // self.bits, "outputs", self.method)
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


class CompressedTensorsLayout(PackedLayout):
    """Layout `pack-quantized` of compressed-tensors, which transformers and vLLM read."""

    method, marker = "compressed-tensors", ".weight_packed"
    parts = (".weight_scale", ".weight_shape", ".weight_zero_point")

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


LAYOUTS: dict[str, type[PackedLayout]] = {
    layout.method: layout for layout in (CompressedTensorsLayout, GPTQLayout, AWQLayout)
}
"""Layouts that are written, by the name in config.json."""


def read_layout(options: Mapping[str, Any]) -> PackedLayout | None:
    """Return the layout of a `quantization_config`; None for another method.

    Raises:
        ValueError: a variant of the layout that is not supported.
    """
    method = options.get("quant_method")
    if method not in LAYOUTS:
        return None
    layout = _read_groups(options) if method == CompressedTensorsLayout.method else _read_options(options)
    if layout.bits not in (4, 8) or (method == AWQLayout.method and layout.bits != 4):
        raise _unsupported(method, f"weights of {layout.bits} bits")
    return layout


def _read_options(options: Mapping[str, Any]) -> PackedLayout:
    method, group = options["quant_method"], _integer(options, "group_size")
    symmetric = options.get("sym") is not False and method != AWQLayout.method
    sizes = {"bits": _integer(options, "bits"), "group_size": None if group <= 0 else group, "symmetric": symmetric}
    layout = LAYOUTS[method](**sizes)
    version = str(options.get("version" if method == AWQLayout.method else "checkpoint_format") or "").lower()
    if version in ("", "gptq", "gemm"):
        return layout
    if version == "gptq_v2":
        return GPTQv2Layout(**sizes)
    raise _unsupported(method, f"its version {version!r}")


def _read_groups(options: Mapping[str, Any]) -> PackedLayout:
    groups = list((options.get("config_groups") or {}).values())
    if len(groups) != 1 or options.get("format") != "pack-quantized":
        raise _unsupported(options["quant_method"], f"{len(groups)} groups in the format {options.get('format')!r}")
    weights = groups[0].get("weights") or {}
    if weights.get("type") != "int" or groups[0].get("input_activations") is not None:
        raise _unsupported(options["quant_method"], "quantized activations, or weights that are not integers")
    group = weights.get("group_size")
    return CompressedTensorsLayout(
        bits=_integer(weights, "num_bits"),
        group_size=group if isinstance(group, int) and group > 0 else None,
        symmetric=weights.get("symmetric") is not False,
    )


def _integer(options: Mapping[str, Any], key: str) -> int:
    value = options.get(key)
    if type(value) is not int:
        raise ValueError(f"quantization_config in config.json: {key} is {value!r}, which is not a whole number")
    return value


def _unsupported(method: Any, variant: str) -> ValueError:
    return ValueError(
        f"quantization_config in config.json: {method} with {variant} is not supported; known: gptq and "
        "compressed-tensors (pack-quantized) in 4 and 8 bits, awq (gemm) in 4 bits; start from the original model"
    )
