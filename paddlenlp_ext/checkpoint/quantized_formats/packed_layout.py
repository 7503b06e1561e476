"""Base class of the packed integer formats GPTQ, AWQ and compressed-tensors.

A weight is (code - zero point) * scale. In each row, each group of inputs has a scale and a zero point.

| | GPTQ | AWQ | compressed-tensors, `pack-quantized` |
| --- | --- | --- | --- |
| codes | `qweight` [in / n, out] | `qweight` [in, out / n] | `weight_packed` [out, in / n] |
| scales | `scales` [groups, out] | `scales` [groups, out] | `weight_scale` [out, groups] |
| zeros | `qzeros` [groups, out / n], minus 1 | `qzeros` [groups, out / n] | `weight_zero_point` [out / n, groups] |
| other tensors | `g_idx` [in], group of each input | | `weight_shape` [2] |

An int32 word packs n = 32 / bits codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from paddlenlp_ext.checkpoint.weight_source import WeightSource

INTEGER_PARTS = (".weight_scale", ".weight_shape", ".weight_zero", ".weight_order")
"""Name suffixes of the tensors that belong to an integer weight of this package, except for the codes."""


@dataclass(frozen=True)
class IntegerMatrix:
    """Codes, scales and zero points of a linear layer.

    Attributes:
        codes: unsigned codes, uint8 [out, in].
        scales: scales, [out, groups].
        zeros: zero points (codes that stand for 0), uint8 or int16 [out, groups].
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Base class of the packed integer formats.

    Attributes:
        method: value of `quant_method` in config.json.
        marker: name suffix of a tensor that only quantized layers have.
        parts: name suffixes of all tensors of a quantized weight except the tensor with `marker`.
        bits: bits per code, 4 or 8.
        group_size: number of inputs that share a scale; None: all inputs of a row share one scale.
        symmetric: whether written weights have the middle code as zero point; reading always uses the stored zero
            points.
    """

    method: ClassVar[str]
    marker: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    bits: int
    group_size: int | None = None
    symmetric: bool = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> PackedLayout:
        """Return the layout that the `quantization_config` of a config.json describes.

        Raises:
            ValueError: a value has the wrong type, or the variant of the format is not supported.
        """
        raise NotImplementedError

    @property
    def middle(self) -> int:
        """Code in the middle of the range, the zero point of symmetric weights."""
        return 1 << (self.bits - 1)

    def shape(self, source: WeightSource, layer: str) -> tuple[int, int]:
        """Return the shape (out, in) of a layer."""
        raise NotImplementedError

    def codes(self, source: WeightSource, layer: str) -> np.ndarray:
        """Return the codes of a layer, uint8 [out, in]."""
        raise NotImplementedError

    def scales(self, source: WeightSource, layer: str, dtype: str) -> np.ndarray:
        """Return the scales of a layer, [out, groups]."""
        return source.read(f"{layer}.scales", dtype).T

    def scale_name(self, layer: str) -> str:
        """Return the name of the tensor with the scales of a layer."""
        return f"{layer}.scales"

    def required(self, layer: str) -> set[str]:
        """Return the names of the tensors that are required to read a quantized layer."""
        return {layer + self.marker, self.scale_name(layer)}

    def zeros(self, source: WeightSource, layer: str) -> np.ndarray:
        """Return the zero points of a layer, int16 [out, groups]."""
        raise NotImplementedError

    def groups(self, source: WeightSource, layer: str) -> np.ndarray | None:
        """Return the group index of each input of a layer, int [in]; None if groups consist of consecutive inputs."""
        return None

    def tensors(self, layer: str, matrix: IntegerMatrix) -> dict[str, np.ndarray]:
        """Return a dict from the tensor names of a layer to the values to store.

        Raises:
            ValueError: the format does not support the shape of the matrix.
        """
        raise NotImplementedError

    def options(self, skipped: Sequence[str]) -> dict[str, Any]:
        """Return the `quantization_config` for config.json.

        Args:
            skipped: names of the linear layers that are not quantized.
        """
        raise NotImplementedError


def check_multiple(layer: str, size: int, of: int, what: str, layout: str) -> None:
    """Check that the codes of a layer's inputs or outputs fill whole words.

    Args:
        layer: name of the layer.
        size: number of inputs or outputs.
        of: number of codes in a word.
        what: "inputs" or "outputs", for the error message.
        layout: name of the format, for the error message.

    Raises:
        ValueError: `size` is not a multiple of `of`.
    """
    if size % of:
        raise ValueError(
            f"{layer} has {size} {what}, but {layout} needs a multiple of {of}; set weight_layout: compressed-tensors"
        )


def mapping_option(options: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under a key of `quantization_config`; return an empty object for a missing or null value.

    Raises:
        ValueError: the value is not an object.
    """
    value = options.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"quantization_config in config.json: {key} is {value!r}, not an object; correct the value")
    return value or {}


def whole_option(options: Mapping[str, Any], key: str) -> int:
    """Return the integer value of a key of `quantization_config`.

    Raises:
        ValueError: the value is missing or not an integer.
    """
    value = options.get(key)
    if type(value) is not int:
        raise ValueError(f"quantization_config in config.json: {key} is {value!r}, not an integer; correct the value")
    return value
