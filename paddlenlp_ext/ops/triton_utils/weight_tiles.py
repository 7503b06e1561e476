"""Load tiles of unquantized or quantized weights in Triton kernels; independent of Paddle and PyTorch.

4-bit and 8-bit weights are dequantized in registers with the formula of ops/dequantize/kernels.py. A tile consists of
several spans of inputs, so that each warp of a program can multiply a different span.

Kernels for quantized weights run without software pipelining (one stage), because a pipelined kernel would copy each
looked-up level through shared memory.

Names: O outputs, I inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Layer(NamedTuple):
    """Paddle or PyTorch tensors of a linear layer.

    Attributes:
        matrix: unquantized weight [O, I], or codes: int8 [O * I] or uint8 [O * I / 2].
        y: outputs [..., O]; written.
        bias: [O], or None.
        scales: scales of the weight, float32, or uint8 with double quantization; None for an unquantized weight.
        group_scales: float32 factors that dequantize the uint8 scales, one per group of scales; None without double
            quantization.
        offset: float32 [1], added to the dequantized scales; None without double quantization.
    """

    matrix: Any
    y: Any
    bias: Any = None
    scales: Any = None
    group_scales: Any = None
    offset: Any = None


class Format(NamedTuple):
    """Weight format of all layers in a launch.

    Attributes:
        bits: bits per code, 8 or 4; 0 for unquantized weights.
        block: number of weights that share a scale: I, or a power of two that divides I.
        group: number of scales that share a group scale; 0 without double quantization.
        levels: float32 [16], value of each 4-bit code.
        scale_levels: float32 [256], value of each 8-bit scale code; None without double quantization.
    """

    bits: int = 0
    block: int = 1
    group: int = 0
    levels: Any = None
    scale_levels: Any = None

    def constants(self, num_inputs: int, span: int) -> dict[str, int]:
        """Return the compile-time constants of `load_weights`; `num_inputs` is I, and `span` the SPAN of the kernel."""
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
    row,  # int64 [1, O, 1], index of each output's first weight: o * I
    first,  # [W], first input of each span
    is_output,  # [1, O, 1]
    num_inputs,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,  # number of adjacent inputs that share a scale
    SPAN: tl.constexpr,  # inputs per span
):
    """Return weights [W, O, SPAN]; quantized weights are dequantized to float32.

    Values outside the matrix are finite but not always zero.
    """
    i = first[:, None, None] + tl.arange(0, SPAN)[None, None, :]
    is_input = i < num_inputs
    if BITS == 0:
        return tl.load(matrix + row + i, mask=is_output & is_input, other=0.0)
    else:  # an explicit else lets the compiler drop the other branch
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
    """Return the fp32 scales with indices `number`; without NESTED, scales are 0 where `inside` is False."""
    if NESTED:
        code = tl.load(scales + number, mask=inside, other=0).to(tl.int32)
        group_scale = tl.load(group_scales + (first_scale + number) // GROUP, mask=inside, other=0.0)
        return tl.load(scale_levels + code) * group_scale + tl.load(offset)
    else:  # an explicit else lets the compiler drop the other branch
        return tl.load(scales + number, mask=inside, other=0.0)
