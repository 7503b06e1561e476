"""AdamW step with 8-bit moments (Dettmers et al. 2021, arXiv:2110.02861).

The moments are stored in blocks of 256 numbers. A block has one fp32 scale, its largest magnitude; each number divided
by the scale is stored as the code of the nearest of 256 levels (`codebooks.dynamic_levels`, section 1.3 of the paper).
A step dequantizes the moments, updates parameter and moments in fp32, and quantizes the moments again. All backends
store the same codes.
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
from paddlenlp_ext.ops.triton_launch import on_gpu_with_triton

_DROPPED_BITS = 14  # of 32; the remaining bits still distinguish float32 numbers that differ by 0.2 %
_SMALLEST = 1e-38


class Dynamic8Bit:
    """Block-wise quantizer of fp32 rows; each row is one block with its own scale."""

    def __init__(self, signed: bool) -> None:
        levels = dynamic_levels(signed)
        base, threshold = search_table(levels)
        self.zero = int(np.flatnonzero(levels == 0)[0])
        """Code of the level 0."""
        self._levels, self._base, self._threshold = _Table(levels), _Table(base), _Table(threshold)

    def quantize(self, blocks: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Quantize fp32 [blocks, size] to uint8 codes of the same shape and fp32 scales [blocks, 1]."""
        scales = blocks.abs().max(axis=1, keepdim=True)
        return self.nearest(blocks / scales.clip(min=_SMALLEST)), scales

    def dequantize(self, codes: paddle.Tensor, scales: paddle.Tensor) -> paddle.Tensor:
        """Return the fp32 numbers [blocks, size] of codes and scales."""
        return self._levels.look_up(codes).multiply_(scales)

    def nearest(self, values: paddle.Tensor) -> paddle.Tensor:
        """Return the uint8 code of the level nearest to each fp32 number in [-1, 1]; ties go to the lower level."""
        row = paddle.bitwise_right_shift(
            values.view("int32"), paddle.full([], _DROPPED_BITS, "int32"), is_arithmetic=False
        )
        above = values > self._threshold.look_up(row)
        return self._base.look_up(row).add_(above.astype("uint8"))


class _Table:
    """Lookup table; on the CPU read with NumPy, which takes a third of the time of Paddle's gather."""

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers = numbers
        self._tensor: paddle.Tensor | None = None

    def look_up(self, index: paddle.Tensor) -> paddle.Tensor:
        """Return the table's numbers at `index`, in the shape of `index`."""
        if index.place.is_cpu_place():
            return paddle.to_tensor(np.take(self._numbers, index.numpy()), place=index.place)
        return self.gather(index)

    def gather(self, index: paddle.Tensor) -> paddle.Tensor:
        """Look up numbers with Paddle's gather, on any device."""
        if self._tensor is None:
            self._tensor = paddle.to_tensor(self._numbers, place=index.place)
        return paddle.gather(self._tensor, index.reshape([-1]).astype("int32")).reshape(index.shape)


@functools.cache
def dynamic_8bit(signed: bool) -> Dynamic8Bit:
    """Return the quantizer for signed numbers, or for numbers that are never negative."""
    return Dynamic8Bit(signed)


def search_table(levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower level and the border to the next level, for each group of float32 numbers with equal upper bits.

    Two lookups replace a binary search of eight steps. The result is the same, because at most one border lies in a
    group.
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
"""Blocks that are dequantized at a time in plain Paddle: 1 MB of fp32, which fits a core's cache."""


class Moments8Bit(NamedTuple):
    """Quantized moments of one parameter; the second moment is never negative.

    Attributes:
        codes1, codes2: uint8 [blocks, BLOCK].
        scales1, scales2: float32 [blocks, 1].
    """

    codes1: paddle.Tensor
    scales1: paddle.Tensor
    codes2: paddle.Tensor
    scales2: paddle.Tensor


class AdamStep(NamedTuple):
    """Hyperparameters of one step; `number` counts from 1, `rate` is the learning rate."""

    beta1: float
    beta2: float
    epsilon: float
    number: int
    rate: float

    @property
    def correction1(self) -> float:
        """Bias correction of the first moment, 1 / (1 - beta1^number)."""
        return 1.0 / (1.0 - self.beta1**self.number)

    @property
    def correction2(self) -> float:
        """Bias correction of the second moment, 1 / (1 - beta2^number)."""
        return 1.0 / (1.0 - self.beta2**self.number)

    def accumulate(self, moment1: paddle.Tensor, moment2: paddle.Tensor, gradient: paddle.Tensor) -> None:
        """Update both moments with a gradient, in place."""
        moment1.scale_(self.beta1).add_(gradient * (1.0 - self.beta1))
        moment2.scale_(self.beta2).add_(gradient.square().scale_(1.0 - self.beta2))

    def quotient(self, moment1: paddle.Tensor, moment2: paddle.Tensor) -> paddle.Tensor:
        """Return the update direction: the bias-corrected first moment over the root of the second."""
        root = (moment2 * self.correction2).sqrt_().add_(paddle.full([], self.epsilon))
        return (moment1 * self.correction1).divide_(root)


def adamw_8bit_reference(value: paddle.Tensor, gradient: paddle.Tensor, moments: Moments8Bit, step: AdamStep) -> None:
    """Update one parameter in plain Paddle, on any device."""
    flat_value, flat_gradient = value.reshape([-1]), gradient.reshape([-1])  # views, no copy
    for first in range(0, moments.codes1.shape[0], _SLICE):
        blocks, elements = slice(first, first + _SLICE), slice(first * BLOCK, (first + _SLICE) * BLOCK)
        values, block_moments = flat_value[elements], Moments8Bit(*(tensor[blocks] for tensor in moments))
        quotient = _quotient_of_blocks(_in_blocks(flat_gradient[elements]), block_moments, step)
        values.subtract_(quotient.reshape([-1])[: values.shape[0]].scale_(step.rate))


def _quotient_of_blocks(gradient: paddle.Tensor, moments: Moments8Bit, step: AdamStep) -> paddle.Tensor:
    """Return the update direction [blocks, BLOCK] and update the moments in place."""
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
    """Reshape a flat tensor to rows of `BLOCK` numbers; the last row is padded with zeros."""
    missing = -flat.shape[0] % BLOCK
    return (F.pad(flat, [0, missing]) if missing else flat).reshape([-1, BLOCK])


def adamw_8bit_cpp(value: paddle.Tensor, gradient: paddle.Tensor, moments: Moments8Bit, step: AdamStep) -> None:
    """Update one parameter in a single pass over its values (csrc/adamw_8bit.cpp)."""
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
    """Return the DynamicLevels struct of a quantizer."""
    base, _ = search_table(dynamic_levels(signed))
    levels = dynamic_levels(signed)
    borders = np.append((levels[:-1] + levels[1:]) / np.float32(2), np.float32(np.inf))
    arrays = (levels, borders, base)
    found = struct("DynamicLevels")(*(array.ctypes.data for array in arrays))
    found.arrays = arrays  # keeps the memory alive that the addresses point to
    return found


def adamw_8bit_single_triton(
    value: paddle.Tensor, gradient: paddle.Tensor, moments: Moments8Bit, step: AdamStep
) -> None:
    """Update one parameter by the kernel that updates many in one launch (ops/adamw/triton.py)."""
    from paddlenlp_ext.ops.adamw.triton import AdamW8BitUpdate, adamw_8bit_triton

    adamw_8bit_triton([AdamW8BitUpdate(value, gradient, moments, step, 0.0)])


adamw_8bit_op = DispatchedOp(
    "adamw in 8 bits",
    native=(adamw_8bit_cpp, usable),
    triton=(adamw_8bit_single_triton, on_gpu_with_triton),
    reference=adamw_8bit_reference,
)
