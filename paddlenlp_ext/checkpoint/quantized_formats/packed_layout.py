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

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> PackedLayout:
        """Return the layout that the `quantization_config` of a config.json describes.

        Raises:
            ValueError: a value has the wrong type, or the variant of the format is not supported.
        """
        raise NotImplementedError

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


def check_multiple(layer: str, size: int, of: int, what: str, layout: str) -> None:
    """Check that a layer's size is a multiple of the number of codes in a word.

    Raises:
        ValueError: the size is not a multiple.
    """
    if size % of:
        raise ValueError(
            f"{layer} has {size} {what}, and the layout {layout} packs them by {of}; choose the layout "
            "compressed-tensors"
        )


def whole_option(options: Mapping[str, Any], key: str) -> int:
    """Return a whole number of `quantization_config`.

    Raises:
        ValueError: the value has another type.
    """
    value = options.get(key)
    if type(value) is not int:
        raise ValueError(f"quantization_config in config.json: {key} is {value!r}, which is not a whole number")
    return value


def unsupported(method: Any, variant: str) -> ValueError:
    """Return the error for a variant of a format that is not supported."""
    return ValueError(
        f"quantization_config in config.json: {method} with {variant} is not supported; known: gptq and "
        "compressed-tensors (pack-quantized) in 4 and 8 bits, awq (gemm) in 4 bits; start from the original model"
    )
