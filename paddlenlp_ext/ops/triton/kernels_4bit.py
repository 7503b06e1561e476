"""Weights in 4 bits, dequantized or multiplied with at once: kernels that know neither Paddle nor PyTorch.

    w[i] = level[code[i]] scale[i // block],        two codes a byte, the first in the high half
    scale[j] = scale_level[code8[j]] group_scale[j // group] + offset        where the scales are quantized too

over the flattened weight [O, I], row by row (Dettmers et al. 2023, QLoRA, arXiv 2305.14314); block and I are even, so
that both halves of a byte have one scale and one row. Tested in Triton's interpreter, tests/ops/test_triton_4bit.py.

Names: T positions, O and I outputs and inputs. NESTED: the scales are codes; without it what belongs to them is
unused. What divides is a constant of the compiled kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dequantize_kernel(
    codes,  # uint8 [ceil(count / 2)]
    levels,  # float32 [16]
    scales,  # float32, or uint8 with NESTED
    scale_levels,  # float32 [256]
    group_scales,  # float32
    offset,  # float32 [1]
    out,  # [count], of the type to be written
    count,  # weights
    first_scale,  # number of the first scale, within the whole weight
    BLOCK: tl.constexpr,  # weights that share a scale
    GROUP: tl.constexpr,  # scales that share one of group_scales
    NESTED: tl.constexpr,
    BYTES: tl.constexpr,  # read by one program
):
    """Write `count` weights."""
    at = tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    inside = at * 2 < count
    pair = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    scale = _scale(scales, scale_levels, group_scales, offset, (at * 2) // BLOCK, inside, first_scale, GROUP, NESTED)
    first = tl.load(levels + (pair >> 4)) * scale
    second = tl.load(levels + (pair & 15)) * scale
    index = tl.program_id(0) * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    tl.store(out + index, tl.interleave(first, second).to(out.dtype.element_ty), mask=index < count)


@triton.jit
def product_kernel(
    x,  # [T, I]
    codes,  # uint8 [O * I / 2]
    levels,
    scales,
    scale_levels,
    group_scales,
    offset,
    y,  # [T, O], of x's type
    num_positions,
    num_outputs,
    num_inputs,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NESTED: tl.constexpr,
    POSITIONS: tl.constexpr,  # of a program, at least 16
    OUTPUTS: tl.constexpr,  # of a program, at least 16
    BYTES: tl.constexpr,  # of a row, read at one time, at least 16
):
    """y = x W^T for a few positions: W is read once, in 4 bits; products are summed in fp32."""
    t = tl.program_id(1) * POSITIONS + tl.arange(0, POSITIONS)
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row_bytes = num_inputs // 2
    total = tl.zeros((POSITIONS, OUTPUTS), dtype=tl.float32)
    for begin in range(0, row_bytes, BYTES):
        column = begin + tl.arange(0, BYTES)
        inside = (o[None, :] < num_outputs) & (column[:, None] < row_bytes)
        at = o[None, :] * row_bytes + column[:, None]  # the weight transposed, [BYTES, OUTPUTS]
        pair = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
        scale = _scale(scales, scale_levels, group_scales, offset, (at * 2) // BLOCK, inside, 0, GROUP, NESTED)
        read = (t[:, None] < num_positions) & (column[None, :] < row_bytes)
        even = x + t[:, None] * num_inputs + column[None, :] * 2
        x_even, x_odd = tl.load(even, mask=read, other=0.0), tl.load(even + 1, mask=read, other=0.0)
        first = (tl.load(levels + (pair >> 4)) * scale).to(x_even.dtype)
        second = (tl.load(levels + (pair & 15)) * scale).to(x_even.dtype)
        total += tl.dot(x_even, first, input_precision="ieee")
        total += tl.dot(x_odd, second, input_precision="ieee")
    written = (t[:, None] < num_positions) & (o[None, :] < num_outputs)
    tl.store(y + t[:, None] * num_outputs + o[None, :], total.to(y.dtype.element_ty), mask=written)


@triton.jit
def _scale(
    scales, scale_levels, group_scales, offset, number, inside, first_scale, GROUP: tl.constexpr, NESTED: tl.constexpr
):
    """The fp32 scales of those numbers; 0 outside."""
    if NESTED:
        code = tl.load(scales + number, mask=inside, other=0).to(tl.int32)
        group_scale = tl.load(group_scales + (first_scale + number) // GROUP, mask=inside, other=0.0)
        return tl.load(scale_levels + code) * group_scale + tl.load(offset)
    else:  # written out: the compiler leaves the other branch away
        return tl.load(scales + number, mask=inside, other=0.0)
