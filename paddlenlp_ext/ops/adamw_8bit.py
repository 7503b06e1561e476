"""A step of AdamW whose moments are kept in 8 bits (Dettmers et al. 2021, arXiv:2110.02861).

The moments lie in blocks of 256 numbers, each with an fp32 scale. A step reads them, updates parameter and moments in
fp32, and quantizes the moments anew. All implementations store the same codes.

Numbers in 8 bits, block by block, by the dynamic map (Dettmers et al. 2021, arXiv:2110.02861, section 1.3).

A block keeps its largest magnitude in fp32 and, for each number divided by it, the nearest of 256 levels
(`quant_levels.dynamic_levels`): the largest decade has the most of them, each smaller one half as many.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F

from paddlenlp_ext.ops.cpu.api import struct
from paddlenlp_ext.ops.cpu.library import function, pointer, usable
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.quantized.codebooks import dynamic_levels

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


BLOCK = 256
_SLICE = 1024
"""Blocks that are fp32 at one time in plain Paddle: a megabyte, which stays in a core's cache."""


class Moments8Bit(NamedTuple):
    """What is kept of a parameter's gradients; the second moment is never negative.

    Attributes:
        codes1, codes2: uint8 [blocks, BLOCK].
        scales1, scales2: float32 [blocks, 1].
    """

    codes1: paddle.Tensor
    scales1: paddle.Tensor
    codes2: paddle.Tensor
    scales2: paddle.Tensor


class AdamStep(NamedTuple):
    """The numbers of a step; `number` counts from 1, `rate` is the learning rate."""

    beta1: float
    beta2: float
    epsilon: float
    number: int
    rate: float

    @property
    def correction1(self) -> float:
        """What frees the first moment of its start at 0."""
        return 1.0 / (1.0 - self.beta1**self.number)

    @property
    def correction2(self) -> float:
        """Likewise the second."""
        return 1.0 / (1.0 - self.beta2**self.number)

    def accumulate(self, moment1: paddle.Tensor, moment2: paddle.Tensor, gradient: paddle.Tensor) -> None:
        """Bring the moments up to date, in place."""
        moment1.scale_(self.beta1).add_(gradient * (1.0 - self.beta1))
        moment2.scale_(self.beta2).add_(gradient.square().scale_(1.0 - self.beta2))

    def quotient(self, moment1: paddle.Tensor, moment2: paddle.Tensor) -> paddle.Tensor:
        """Adam's direction: the first moment over the root of the second, both freed of their start at 0."""
        root = (moment2 * self.correction2).sqrt_().add_(paddle.full([], self.epsilon))
        return moment1 * self.correction1 / root


def adamw_8bit_reference(value: paddle.Tensor, gradient: paddle.Tensor, moments: Moments8Bit, step: AdamStep) -> None:
    """In plain Paddle, on any device."""
    flat_value, flat_gradient = value.reshape([-1]), gradient.reshape([-1])  # views: no number is copied
    for first in range(0, moments.codes1.shape[0], _SLICE):
        blocks, elements = slice(first, first + _SLICE), slice(first * BLOCK, (first + _SLICE) * BLOCK)
        part, here = flat_value[elements], Moments8Bit(*(tensor[blocks] for tensor in moments))
        quotient = _quotient_of_blocks(_in_blocks(flat_gradient[elements]), here, step)
        part.subtract_(quotient.reshape([-1])[: part.shape[0]].scale_(step.rate))


def _quotient_of_blocks(gradient: paddle.Tensor, moments: Moments8Bit, step: AdamStep) -> paddle.Tensor:
    """Adam's direction [blocks, BLOCK]; the moments are updated."""
    stored = [
        (dynamic_8bit(True), moments.codes1, moments.scales1),
        (dynamic_8bit(False), moments.codes2, moments.scales2),
    ]
    numbers = [quantizer.dequantize(codes, scales) for quantizer, codes, scales in stored]
    moment1, moment2 = numbers
    step.accumulate(moment1, moment2, gradient)
    for moment, (quantizer, codes, scales) in zip(numbers, stored, strict=True):
        for new, live in zip(quantizer.quantize(moment), (codes, scales), strict=True):
            paddle.assign(new, live)
    return step.quotient(moment1, moment2)


def _in_blocks(flat: paddle.Tensor) -> paddle.Tensor:
    """Rows of `BLOCK` numbers, the last one filled up with zeros."""
    missing = -flat.shape[0] % BLOCK
    return (F.pad(flat, [0, missing]) if missing else flat).reshape([-1, BLOCK])


def adamw_8bit_cpp(value: paddle.Tensor, gradient: paddle.Tensor, moments: Moments8Bit, step: AdamStep) -> None:
    """In one pass over the parameter (csrc/adamw_8bit.cpp)."""
    assert value.shape == gradient.shape and moments.codes1.shape == [-(-value.size // BLOCK), BLOCK]
    numbers = struct("AdamStep")(
        *(step.beta1, 1.0 - step.beta1, step.beta2, 1.0 - step.beta2),
        *(step.correction1, step.correction2, step.epsilon, step.rate),
    )
    tensors = [pointer(tensor) for tensor in (value, gradient.contiguous(), *moments)]
    run = function("adamw_8bit_update")
    run(*tensors, value.size, ctypes.byref(_levels(True)), ctypes.byref(_levels(False)), ctypes.byref(numbers))


@functools.cache
def _levels(signed: bool) -> ctypes.Structure:
    """Return the DynamicLevels of a quantizer."""
    base, _ = search_table(dynamic_levels(signed))
    levels = dynamic_levels(signed)
    borders = np.append((levels[:-1] + levels[1:]) / np.float32(2), np.float32(np.inf))
    arrays = (levels, borders, base)
    found = struct("DynamicLevels")(*(array.ctypes.data for array in arrays))
    found.kept = arrays  # the addresses hold as long as these do
    return found


adamw_8bit_op = DispatchedOp("adamw in 8 bits", native=(adamw_8bit_cpp, usable), reference=adamw_8bit_reference)
