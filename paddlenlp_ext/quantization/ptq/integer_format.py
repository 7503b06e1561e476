"""Integer formats with a scale and a zero point for each group of inputs: codes, ranges, and packing.

    code = clip(round(w / scale) + zero, -2^(bits - 1), 2^(bits - 1) - 1)        w ~ (code - zero) scale

    symmetric      scale = max|group| / (2^(bits - 1) - 1)                       zero = 0
    asymmetric     high = max(group, 0), low = min(group, 0, -high / (2^bits - 2))
                   scale = (high - low) / (2^bits - 1)
                   zero = round(-low / scale) - 2^(bits - 1)

The term -high / (2^bits - 2) keeps the zero point above the lowest code. GPTQ files store zero points minus 1, and
programs disagree on the meaning of the lowest stored value. Scales are rounded to the dtype of the file before codes
are computed. Arrays are NumPy arrays in float32.

Shapes: O outputs, I inputs, G groups per row, K inputs per group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import paddle

from paddlenlp_ext.checkpoint.dtypes import cast
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight


@dataclass(frozen=True, kw_only=True)
class IntegerFormat:
    """Format of a weight's codes, scales and zero points.

    Attributes:
        bits: 4 or 8.
        group_size: number of inputs that share a scale; None: all inputs of a row.
        symmetric: whether all zero points are 0.
        scale_dtype: dtype of the scales in the file.
    """

    bits: int
    group_size: int | None = None
    symmetric: bool = True
    scale_dtype: str = "float32"

    @property
    def algo(self) -> str:
        """Algo of the weight, such as weight_only_int4."""
        return f"weight_only_int{self.bits}"

    def group_of(self, inputs: int) -> int:
        """Return K, the number of inputs that share a scale, for rows of `inputs` weights.

        Raises:
            ValueError: the group size does not divide `inputs`.
        """
        group = self.group_size or inputs
        if inputs % group:
            raise ValueError(f"group_size={group} does not divide the {inputs} inputs; choose a divisor")
        return group

    def fit(self, values_OGK: np.ndarray, shrink: float | np.ndarray = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """Return the scales and the zero points of groups of weights, both float32 [O, G].

        Args:
            values_OGK: the weights.
            shrink: clipping factor of each group's range; weights outside the range are clipped.

        Raises:
            ValueError: a scale is not finite in `scale_dtype`.
        """
        least = -(1 << (self.bits - 1))
        if self.symmetric:
            scales = _rounded(np.abs(values_OGK).max(axis=-1) * shrink / -(least + 1), self.scale_dtype)
            return scales, np.zeros_like(scales)
        high = np.maximum(values_OGK.max(axis=-1), 0) * shrink
        low = np.minimum(values_OGK.min(axis=-1) * shrink, high / (2 * least + 2))
        scales = _rounded((high - low) / (-2 * least - 1), self.scale_dtype)
        return scales, np.clip(np.rint(-low / scales) + least, least + 1, -least - 1)

    def codes(self, values: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
        """Return the codes nearest to `values`, as float32; scales and zero points are broadcast."""
        least = -(1 << (self.bits - 1))
        return np.clip(np.rint(values / scales) + zeros, least, -least - 1)


def _rounded(scales: np.ndarray, dtype: str) -> np.ndarray:
    """Round scales to `dtype` and return them as float32; scales that become 0 are replaced with 1."""
    scales = scales.astype(np.float32)
    with np.errstate(over="ignore"):
        rounded = scales if dtype == "float32" else cast(cast(scales, "float32", dtype), dtype, "float32")
    if not np.isfinite(rounded).all():
        raise ValueError(
            f"a weight has values that are not finite or too large for scales in {dtype}; check the model, or choose "
            "another layout"
        )
    return np.where(rounded > 0, rounded, np.float32(1))


@dataclass(frozen=True)
class IntegerWeight:
    """Quantized weight as NumPy arrays.

    Attributes:
        codes: int8 [O, I].
        scales: float32 [O, G].
        zeros: float32 [O, G].
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray

    def dequantized(self) -> np.ndarray:
        """Return the dequantized weight, float32 [O, I]."""
        codes_OGK = self.codes.reshape(*self.scales.shape, -1).astype(np.float32)
        return ((codes_OGK - self.zeros[..., None]) * self.scales[..., None]).reshape(self.codes.shape)

    def packed(self, integers: IntegerFormat) -> QuantizedWeight:
        """Pack the codes; return the weight for a quantized linear layer."""
        out, inputs = self.codes.shape
        codes = self.codes.reshape(-1)
        if integers.bits == 4:
            unsigned = (codes + np.int8(8)).astype(np.uint8)
            unsigned = np.append(unsigned, np.uint8(8)) if len(unsigned) % 2 else unsigned
            codes = (unsigned[::2] << 4) | unsigned[1::2]
        zeros = self.zeros.astype(np.int16).reshape(-1)
        return QuantizedWeight(
            *(integers.algo, (out, inputs), integers.group_of(inputs)),
            *(paddle.to_tensor(codes), paddle.to_tensor(self.scales.reshape(-1))),
            zeros=None if integers.symmetric else paddle.to_tensor(zeros),
        )
