"""Triton kernel that multiplies a few positions by a 4-bit weight; independent of Paddle and PyTorch.

    w[i] = level[code[i]] scale[i // block],        two codes per byte, the first in the high half
    scale[j] = scale_level[code8[j]] group_scale[j // group] + offset        with double quantization

The formulas apply to the flattened weight [O, I], row by row (Dettmers et al. 2023, QLoRA, arXiv:2305.14314). `block`
and I are even, so that both codes of a byte share one scale and one row. The kernel is tested in Triton's interpreter
(tests/ops/quantized_linear/test_triton.py) and measured on an H200 (docs/benchmarks.md).

Names: T positions, O outputs, I inputs. NESTED: the scales are quantized; otherwise the parameters of double
quantization are unused. Divisors are compile-time constants.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paddlenlp_ext.ops.triton_utils.tile_sizes import TileSizes
from paddlenlp_ext.ops.triton_utils.weight_tiles import load_scales

PRODUCT_SIZES = TileSizes(
    "product_4bit",
    (),
    OUTPUTS=(1, 2, 4),
    INPUTS=(512, 1024),  # inputs read at a time
    num_warps=(1, 2, 4),
)

LARGEST_BLOCK = min(PRODUCT_SIZES.choices["INPUTS"])
"""Largest number of weights that share a scale in `product_kernel`."""


@triton.jit
def product_kernel(
    x,  # [T, I]
    codes,  # uint8 [O * I / 2]
    levels,
    scales,
    scale_levels,
    group_scales,
    offset,
    y,  # [T, O], in the dtype of x
    num_outputs,
    num_inputs,  # a multiple of BLOCK
    BLOCK: tl.constexpr,  # a power of two
    GROUP: tl.constexpr,
    NESTED: tl.constexpr,
    OUTPUTS: tl.constexpr,  # outputs per program
    BLOCKS: tl.constexpr,  # blocks of a row read at a time
):
    """Compute y = x W^T; a program computes a few outputs of one position and accumulates in fp32.

    The number of instructions limits the speed. To save instructions, x is read in vectors, and the dequantized weights
    are interleaved in the order of x.
    """
    HALF: tl.constexpr = BLOCK // 2
    t = tl.program_id(1)
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row_blocks = num_inputs // BLOCK
    total = tl.zeros((OUTPUTS, BLOCKS, BLOCK), dtype=tl.float32)
    for begin in range(0, row_blocks, BLOCKS):
        b = begin + tl.arange(0, BLOCKS)
        number = o[:, None] * row_blocks + b[None, :]
        in_row = b < row_blocks
        inside = (o < num_outputs)[:, None] & in_row[None, :]
        at = number[:, :, None] * HALF + tl.arange(0, HALF)
        pair = tl.load(codes + at, mask=inside[:, :, None], other=0).to(tl.int32)
        scale = load_scales(scales, scale_levels, group_scales, offset, number, inside, 0, GROUP, NESTED)[:, :, None]
        first = tl.load(levels + (pair >> 4)) * scale
        second = tl.load(levels + (pair & 15)) * scale
        column = b[:, None] * BLOCK + tl.arange(0, BLOCK)
        numbers = tl.load(x + t * num_inputs + column, mask=in_row[:, None], other=0.0).to(tl.float32)
        total += numbers * tl.interleave(first, second)
    sums = tl.sum(tl.sum(total, axis=2), axis=1)
    tl.store(y + t * num_outputs + o, sums.to(y.dtype.element_ty), mask=o < num_outputs)
