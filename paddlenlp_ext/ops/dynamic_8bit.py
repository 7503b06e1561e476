"""Numbers in 8 bits, block by block, by the dynamic map (Dettmers et al. 2021, arXiv:2110.02861, section 1.3).

A block keeps its largest magnitude in fp32 and, for each number divided by it, the nearest of 256 levels
(`quant_levels.dynamic_levels`): the largest decade has the most of them, each smaller one half as many.
"""

from __future__ import annotations

import functools

import numpy as np
import paddle

from paddlenlp_ext.ops.quant_levels import dynamic_levels

_DROPPED_BITS = 14  # of a float32's 32: what remains tells numbers 0.2 % apart from each other
_SMALLEST = 1e-38


class Dynamic8Bit:
    """Quantizes fp32 rows, each one block with a scale of its own, and back."""

    def __init__(self, signed: bool) -> None:
        levels = dynamic_levels(signed)
        base, threshold = search_table(levels)
        self.zero = int(np.flatnonzero(levels == 0)[0])
        """The code of 0."""
        self._levels, self._base, self._threshold = _Table(levels), _Table(base), _Table(threshold)

    def quantize(self, blocks: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Codes uint8 [blocks, size] and scales fp32 [blocks, 1] of fp32 numbers [blocks, size]."""
        scales = blocks.abs().max(axis=1, keepdim=True)
        return self.nearest(blocks / scales.clip(min=_SMALLEST)), scales

    def dequantize(self, codes: paddle.Tensor, scales: paddle.Tensor) -> paddle.Tensor:
        """The numbers that `quantize` stored, fp32 [blocks, size]."""
        return self._levels.look_up(codes).multiply_(scales)

    def nearest(self, values: paddle.Tensor) -> paddle.Tensor:
        """The code uint8 of the level nearest to each fp32 number between -1 and 1; of two equally near the lower."""
        row = paddle.bitwise_right_shift(
            values.view("int32"), paddle.full([], _DROPPED_BITS, "int32"), is_arithmetic=False
        )
        above = values > self._threshold.look_up(row)
        return self._base.look_up(row).add_(above.astype("uint8"))


class _Table:
    """Numbers to be looked up by tensors; on the CPU by NumPy, which takes a third of the time of Paddle's gather."""

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers = numbers
        self._tensor: paddle.Tensor | None = None

    def look_up(self, index: paddle.Tensor) -> paddle.Tensor:
        """The numbers at `index`, in its shape."""
        if index.place.is_cpu_place():
            return paddle.to_tensor(np.take(self._numbers, index.numpy()), place=index.place)
        return self.gather(index)

    def gather(self, index: paddle.Tensor) -> paddle.Tensor:
        """`look_up` in plain Paddle, on any device."""
        if self._tensor is None:
            self._tensor = paddle.to_tensor(self._numbers, place=index.place)
        return paddle.gather(self._tensor, index.reshape([-1]).astype("int32")).reshape(index.shape)


@functools.cache
def dynamic_8bit(signed: bool) -> Dynamic8Bit:
    """The quantizer for signed numbers, or for numbers that are never negative."""
    return Dynamic8Bit(signed)


def search_table(levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each run of float32 numbers that share their upper bits: the lower level, and where the next one begins.

    Two lookups in place of a binary search of eight steps; the result is the same, because no run meets two borders.
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
