"""Base class of the packed integer formats of other programs: GPTQ, AWQ, compressed-tensors.

A weight is (code - zero) * scale, with a scale and a zero point for each group of inputs of a row.

| | GPTQ | AWQ | compressed-tensors, `pack-quantized` |
| --- | --- | --- | --- |
| codes | `qweight` [in / n, out] | `qweight` [in, out / n] | `weight_packed` [out, in / n] |
| scales | `scales` [groups, out] | `scales` [groups, out] | `weight_scale` [out, groups] |
| zeros | `qzeros` [groups, out / n], minus 1 | `qzeros` [groups, out / n] | `weight_zero_point` [out / n, groups] |
| others | `g_idx` [in], group of each input | | `weight_shape` [2] |

An int32 word holds n = 32 / bits codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from paddlenlp_ext.checkpoint.weight_source import WeightSource

INTEGER_PARTS = (".weight_scale", ".weight_shape", ".weight_zero", ".weight_order")
"""Name suffixes of the tensors that this package stores for an integer weight besides its codes."""


@dataclass(frozen=True)
class IntegerMatrix:
    """Codes, scales and zero points of a linear layer.

    Attributes:
        codes: uint8 [out, in], unsigned.
        scales: [out, groups].
        zeros: uint8 or int16 [out, groups]; the code of the value 0.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Base class of the packed integer formats.

    Attributes:
        method: `quant_method` in config.json.
        marker: name suffix of the tensor with the codes.
        parts: name suffixes of the other tensors.
        bits: 4 or 8.
        group_size: number of inputs that share a scale; None: all inputs of a row.
        symmetric: whether new weights have the middle code as zero point; stored zero points are always read.
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
        """Zero point of symmetric weights."""
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
        """Return the name of the tensor of a layer's scales."""
        return f"{layer}.scales"

    def zeros(self, source: WeightSource, layer: str) -> np.ndarray:
        """Return the zero points of a layer, int16 [out, groups]."""
        raise NotImplementedError

    def groups(self, source: WeightSource, layer: str) -> np.ndarray | None:
        """Return the group of each input of a layer, int [in]; None if groups are runs of consecutive inputs."""
        return None

    def tensors(self, layer: str, matrix: IntegerMatrix) -> dict[str, np.ndarray]:
        """Return the tensors to store for a layer.

        Raises:
            ValueError: the format cannot store a matrix of this shape.
        """
        raise NotImplementedError

    def options(self, skipped: Sequence[str]) -> dict[str, Any]:
        """Return `quantization_config` of config.json.

        Args:
            skipped: names of the linear layers in full precision.
        """
        raise NotImplementedError


def check_multiple(layer: str, size: int, of: int, what: str, layout: str) -> None:
    """Check that a layer's size is a multiple of the number of codes in a word.

    Raises:
        ValueError: the size is not a multiple.
    """
    if size % of:
        raise ValueError(
            f"{layer} has {size} {what}, but {layout} needs a multiple of {of}; choose weight_layout compressed-tensors"
        )


def whole_option(options: Mapping[str, Any], key: str) -> int:
    """Return a whole number of `quantization_config`.

    Raises:
        ValueError: the value has another type.
    """
    value = options.get(key)
    if type(value) is not int:
        raise ValueError(f"quantization_config in config.json: {key} is {value!r}, not an integer; correct it")
    return value


def unsupported(method: Any, variant: str) -> ValueError:
    """Return the error for a variant of a format that is not supported."""
    return ValueError(
        f"quantization_config in config.json: {method} with {variant} is not supported; known: gptq and "
        "compressed-tensors (pack-quantized) in 4 and 8 bits, awq (gemm) in 4 bits; start from the original model"
    )
