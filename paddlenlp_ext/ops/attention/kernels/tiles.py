"""Triton functions that the attention kernels share: addresses, loads, stores and scores of tiles."""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def rows_of_head(x, position, num_heads, head, DIM: tl.constexpr):
    """Return a pointer to the channels of a head at a position of x [..., heads, DIM], and the stride of positions."""
    stride = num_heads * DIM
    return x + position * stride + head * DIM, stride


@triton.jit
def tiles_of(indices, counts, row, tile, width):
    """Return the tile list of a tile (tile_lists.py): pointer, number of full tiles, and number of all tiles."""
    at = row * tl.num_programs(0) + tile
    return indices + at * width, tl.load(counts + at * 2), tl.load(counts + at * 2 + 1)


@triton.jit
def load_rows(
    x, first, length, stride, ROWS: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr, BOUNDED: tl.constexpr
):
    """Load ROWS rows of a head from `first`, [ROWS, CHANNELS]; rows at or after `length` are zeros if BOUNDED."""
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, CHANNELS)[None, :]
    at = x + first.to(tl.int64) * stride + r * stride + c
    if BOUNDED and DIM < CHANNELS:
        return tl.load(at, mask=(first + r < length) & (c < DIM), other=0.0)
    if BOUNDED:
        return tl.load(at, mask=first + r < length, other=0.0)
    if DIM < CHANNELS:
        return tl.load(at, mask=c < DIM, other=0.0)
    return tl.load(at)


@triton.jit
def store_rows(x, tile, first, length, stride, ROWS: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr):
    """Store a tile in the layout of `load_rows`, in the dtype of `x`."""
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, CHANNELS)[None, :]
    at = x + first.to(tl.int64) * stride + r * stride + c
    tl.store(at, tile.to(x.dtype.element_ty), mask=(first + r < length) & (c < DIM))


@triton.jit
def scores_of(x, i, j, starts, inner, outer, slope, CAPPED: tl.constexpr, BIASED: tl.constexpr, MASKED: tl.constexpr):
    """Return the scores in base 2 and, if CAPPED, the tanh of the scaled products.

    Unless BIASED, the caller must still multiply the scores by `outer`. The rows of x are either the queries i or the
    keys j. `starts` has the start row of each key.
    """
    ratio = x  # a placeholder unless CAPPED
    if CAPPED:
        ratio = 1.0 - 2.0 / (tl.exp2(x * inner) + 1.0)
        x = ratio
    if BIASED:
        x = x * outer - (i - j).to(tl.float32) * slope
    if MASKED:
        x = tl.where((j <= i) & (i < starts), x, float("-inf"))
    return x, ratio
