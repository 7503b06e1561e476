"""Tiles of dense and quantized weights, as Triton kernels read them; independent of Paddle and PyTorch.

Weights in 4 and 8 bits are dequantized in registers, as in ops/dequantize/kernels.py. A tile has several spans of
inputs side by side, so that each warp of a program can multiply a span of its own.

The software pipeline of the compiler would copy each looked-up level of a code through shared memory, so that codes are
read in one stage.

Names: O outputs, I inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Layer(NamedTuple):
    """Tensors of a layer, of any framework.

    Attributes:
        matrix: float [O, I]; or codes, int8 [O * I] or uint8 [O * I / 2].
        y: outputs [..., O]; written.
        bias: [O], or None.
        scales: float32, or uint8 with `group_scales`; None for a matrix of floats.
        group_scales, offset: float32, and float32 [1]; None if scales are not quantized.
    """

    matrix: Any
    y: Any
    bias: Any = None
    scales: Any = None
    group_scales: Any = None
    offset: Any = None


class Format(NamedTuple):
    """Format of the matrices of a launch.

    Attributes:
        bits: 8 or 4 of a code; 0 for floats.
        block: weights that share a scale: I, or a power of two that divides I.
        group: scales that share a group scale; 0 without group scales.
        levels: float32 [16], value of each code of 4 bits.
        scale_levels: float32 [256], value of each code of a scale; None without group scales.
    """

    bits: int = 0
    block: int = 1
    group: int = 0
    levels: Any = None
    scale_levels: Any = None

    def constants(self, num_inputs: int, span: int) -> dict[str, int]:
        """Return the constants of `load_weights` for rows of I weights that are read `span` at a time."""
        unit = span if self.block in (1, num_inputs) else min(self.block, span)
        return {"BITS": self.bits, "BLOCK": self.block, "GROUP": self.group, "UNIT": unit}


@triton.jit
def load_weights(
    matrix,  # see `Layer`
    scales,
    scale_levels,  # see `Format`
    group_scales,
    offset,
    levels,
    row,  # int64 [1, O, 1], o I for each output o
    first,  # [W], first input of each span
    is_output,  # [1, O, 1]
    num_inputs,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,  # neighbours of a span that share a scale
    SPAN: tl.constexpr,  # inputs of a span
):
    """Return the weights [W, O, SPAN] of some outputs; 0 outside the matrix, and float32 if it has codes."""
    i = first[:, None, None] + tl.arange(0, SPAN)[None, None, :]
    is_input = i < num_inputs
    if BITS == 0:
        return tl.load(matrix + row + i, mask=is_output & is_input, other=0.0)
    else:  # explicit else: the compiler drops the other branch
        unit = first[:, None] + tl.arange(0, SPAN // UNIT)[None, :] * UNIT
        is_unit = is_output & (unit < num_inputs)[:, None, :]
        number = (row + unit[:, None, :]) // BLOCK
        factor = load_scales(scales, scale_levels, group_scales, offset, number, is_unit, 0, max(1, GROUP), GROUP > 0)
        if BITS == 8:
            own = tl.load(matrix + row + i, mask=is_output & is_input, other=0).to(tl.float32)
        else:
            half = (first // 2)[:, None, None] + tl.arange(0, SPAN // 2)[None, None, :]
            pair = tl.load(matrix + row // 2 + half, mask=is_output & (half * 2 < num_inputs), other=0)
            pair = pair.to(tl.int32)
            own = tl.interleave(tl.load(levels + (pair >> 4)), tl.load(levels + (pair & 15)))
        by_unit = own.reshape((own.shape[0], own.shape[1], SPAN // UNIT, UNIT)) * factor[:, :, :, None]
        return by_unit.reshape((own.shape[0], own.shape[1], SPAN))


@triton.jit
def load_scales(
    scales, scale_levels, group_scales, offset, number, inside, first_scale, GROUP: tl.constexpr, NESTED: tl.constexpr
):
    """Return the fp32 scales with the indices `number`; without NESTED, 0 where `inside` is False."""
    if NESTED:
        code = tl.load(scales + number, mask=inside, other=0).to(tl.int32)
        group_scale = tl.load(group_scales + (first_scale + number) // GROUP, mask=inside, other=0.0)
        return tl.load(scale_levels + code) * group_scale + tl.load(offset)
    else:  # explicit else: the compiler drops the other branch
        return tl.load(scales + number, mask=inside, other=0.0)
