"""Triton kernel that dequantizes 4-bit weights; independent of Paddle and PyTorch.

    w[i] = level[code[i]] scale[i // block],        two codes per byte, the first in the high half
    scale[j] = scale_level[code8[j]] group_scale[j // group] + offset        with double quantization

The formulas apply to the flattened weight [O, I], row by row (Dettmers et al. 2023, QLoRA, arXiv:2305.14314). `block`
is even, so that both codes of a byte share one scale. The kernel is tested in Triton's interpreter
(tests/ops/quantized_linear/test_triton.py) and measured on an H200 (docs/benchmarks.md).

Names: O outputs, I inputs. NESTED: the scales are quantized; otherwise the parameters of double quantization are
unused. Divisors are compile-time constants.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paddlenlp_ext.ops.triton_utils.tile_sizes import TileSizes
from paddlenlp_ext.ops.triton_utils.weight_tiles import load_scales

DEQUANTIZE_SIZES = TileSizes(
    "dequantize_4bit",
    (),
    lambda entry: 4 <= entry["BYTES"] // (32 * entry["num_warps"]) <= 16,
    BYTES=(512, 1024, 2048, 4096),  # bytes of codes that a program reads
    num_warps=(4, 8),
)


@triton.jit
def dequantize_kernel(
    codes,  # uint8 [ceil(count / 2)]
    levels,  # float32 [16]
    scales,  # float32, or uint8 with NESTED
    scale_levels,  # float32 [256]
    group_scales,  # float32
    offset,  # float32 [1]
    out,  # [count], in the dtype to write
    count,  # weights
    num_bytes,  # number of bytes of codes: count / 2, rounded up
    first_scale,  # index of the first scale in the full weight
    BLOCK: tl.constexpr,  # weights that share a scale
    GROUP: tl.constexpr,  # scales that share a group scale
    NESTED: tl.constexpr,
    BYTES: tl.constexpr,  # bytes of codes that a program reads
):
    """Dequantize `count` weights."""
    at = tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    inside = at < num_bytes
    pair = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    scale = load_scales(
        scales, scale_levels, group_scales, offset, (at * 2) // BLOCK, inside, first_scale, GROUP, NESTED
    )
    first = tl.load(levels + (pair >> 4)) * scale
    second = tl.load(levels + (pair & 15)) * scale
    index = tl.program_id(0) * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    tl.store(out + index, tl.interleave(first, second).to(out.dtype.element_ty), mask=index < count)
