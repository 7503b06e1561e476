"""Block-wise 8-bit quantizer of optimizer moments (Dettmers et al. 2021, arXiv:2110.02861).

The fp32 scale of a block is the largest magnitude in the block. Each value is divided by the scale and stored as the
code of the nearest of 256 levels (`codebooks.dynamic_levels`, section 1.3 of the paper).
"""

from __future__ import annotations

import functools

import numpy as np
import paddle

from paddlenlp_ext.devices import device_name
from paddlenlp_ext.ops.quantized_weight.codebooks import dynamic_levels
from paddlenlp_ext.ops.tensor_utils import bits_of

_DROPPED_BITS = 14  # low float32 bits that the search table ignores; the upper 18 bits resolve differences of 0.2 %

_SMALLEST = 1e-38


class Dynamic8Bit:
    """Quantizer of fp32 rows; each row is one block with its own scale."""

    def __init__(self, signed: bool) -> None:
        levels = dynamic_levels(signed)
        base, threshold = search_table(levels)
        self.zero = int(np.flatnonzero(levels == 0)[0])
        """Code that represents zero."""
        self._levels, self._base, self._threshold = _Table(levels), _Table(base), _Table(threshold)

    def quantize(self, blocks: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Quantize fp32 [blocks, size] to uint8 codes of the same shape and fp32 scales [blocks, 1]."""
        scales = blocks.abs().max(axis=1, keepdim=True)
        return self.nearest(blocks / scales.clip(min=_SMALLEST)), scales

    def dequantize(self, codes: paddle.Tensor, scales: paddle.Tensor) -> paddle.Tensor:
        """Return the fp32 values [blocks, size] of codes and scales."""
        return self._levels.look_up(codes).multiply_(scales)

    def nearest(self, values: paddle.Tensor) -> paddle.Tensor:
        """Return the uint8 code of the level nearest to each fp32 value in [-1, 1]; ties go to the lower level."""
        row = paddle.bitwise_right_shift(
            bits_of(values, "int32"), paddle.full([], _DROPPED_BITS, "int32"), is_arithmetic=False
        )
        above = values > self._threshold.look_up(row)
        return self._base.look_up(row).add_(above.astype("uint8"))


class _Table:
    """Lookup table. On the CPU, NumPy reads the table, because NumPy is three times as fast as Paddle's gather."""

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers = numbers
        self._tensors: dict[str, paddle.Tensor] = {}

    def look_up(self, index: paddle.Tensor) -> paddle.Tensor:
        """Return the entries at `index`, in the shape of `index`."""
        if index.place.is_cpu_place():
            return paddle.to_tensor(np.take(self._numbers, index.numpy()), place=index.place)
        return self.gather(index)

    def gather(self, index: paddle.Tensor) -> paddle.Tensor:
        """Return the entries at `index` with Paddle's gather, on any device."""
        device = device_name(index.place)
        if device not in self._tensors:
            self._tensors[device] = paddle.to_tensor(self._numbers, place=index.place)
        return paddle.gather(self._tensors[device], index.reshape([-1]).astype("int32")).reshape(index.shape)


@functools.cache
def dynamic_8bit(signed: bool) -> Dynamic8Bit:
    """Return the quantizer for signed or for non-negative values."""
    return Dynamic8Bit(signed)


def search_table(levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two tables indexed by the upper bits of a float32 value: the lowest code, and the border to the next code.

    Two table lookups replace a binary search of eight steps. The lookups are exact, because at most one border lies
    between float32 values with equal upper bits.
    """
    upper_bits = np.arange(2 ** (32 - _DROPPED_BITS), dtype=np.uint32) << np.uint32(_DROPPED_BITS)
    inner, outer = upper_bits.view(np.float32), (upper_bits | np.uint32(2**_DROPPED_BITS - 1)).view(np.float32)
    in_range = np.abs(inner) <= 1
    lowest = np.where(in_range, np.minimum(inner, outer), np.float32(0))
    highest = np.where(in_range, np.maximum(inner, outer), np.float32(0))
    borders = (levels[:-1] + levels[1:]) / np.float32(2)
    base = np.searchsorted(borders, lowest)
    assert (np.searchsorted(borders, highest) - base <= 1).all()
    return base.astype(np.uint8), np.append(borders, np.float32(np.inf))[base]
