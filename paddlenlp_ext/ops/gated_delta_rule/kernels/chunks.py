"""Parts of the kernels of recurrences: tiles of positions and states, decays, inverse matrices."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def positions_of(chunks, chunk, CHUNK: tl.constexpr):
    """Return the first position of a chunk, and which of the C positions from there on belong to its document."""
    first = tl.load(chunks + chunk * 2)
    return first, first + tl.arange(0, CHUNK) < tl.load(chunks + chunk * 2 + 1)


@triton.jit
def rows_of(x, first, is_row, head, num_heads, channel, DIM: tl.constexpr, CHANNELS: tl.constexpr):
    """Return the addresses of a tile [C, CHANNELS] of x [T, num_heads, DIM], and the mask of the document's positions.

    Args:
        first, is_row: result of `positions_of`.
        channel: first channel of the tile.
    """
    # The large offset is a scalar, because 64-bit offsets of all elements would take many registers.
    start = x + (first.to(tl.int64) * num_heads + head) * DIM
    i, c = tl.arange(0, is_row.shape[0]), channel + tl.arange(0, CHANNELS)
    return start + (i[:, None] * (num_heads * DIM) + c[None, :]), is_row[:, None] & (c < DIM)[None, :]


@triton.jit
def load_rows(x, first, is_row, head, num_heads, channel, DIM: tl.constexpr, CHANNELS: tl.constexpr):
    """Load the tile of `rows_of`, with zeros after the end of the document."""
    addresses, inside = rows_of(x, first, is_row, head, num_heads, channel, DIM, CHANNELS)
    return tl.load(addresses, mask=inside, other=0.0)


@triton.jit
def scalars_of(x, first, is_row, head, num_heads):
    """Return the addresses of C positions of x [T, num_heads]; the other arguments are described in `rows_of`."""
    return x + first.to(tl.int64) * num_heads + head + tl.arange(0, is_row.shape[0]) * num_heads


@triton.jit
def state_of(x, index, head, num_heads, column, KEY_DIM, VALUE_DIM, KEYS: tl.constexpr, VALUES: tl.constexpr):
    """Return the addresses of a tile [KEYS, VALUES] of states x [*, num_heads, H, E], and its mask.

    Args:
        index: index of the chunk or of the document.
        column: first column of the tile.
    """
    start = x + (index * num_heads + head).to(tl.int64) * (KEY_DIM * VALUE_DIM)
    h, e = tl.arange(0, KEYS), column + tl.arange(0, VALUES)
    return start + (h[:, None] * VALUE_DIM + e[None, :]), (h < KEY_DIM)[:, None] & (e < VALUE_DIM)[None, :]


@triton.jit
def square_of(x, chunk, head, num_heads, CHUNK: tl.constexpr):
    """Return the addresses of the matrix of a chunk and head in x [M, num_heads, C, C]."""
    i = tl.arange(0, CHUNK)
    return x + (chunk * num_heads + head).to(tl.int64) * (CHUNK * CHUNK) + (i[:, None] * CHUNK + i[None, :])


@triton.jit
def chunk_decays(decay, first, is_row, head, num_heads):
    """Return the sums c [C] in float64, and e^c, e^(c_C - c) and e^(c_C) in float32."""
    own = tl.load(scalars_of(decay, first, is_row, head, num_heads), mask=is_row, other=0.0).to(tl.float64)
    sums, whole = tl.cumsum(own, axis=0), tl.sum(own, axis=0)
    until_end = tl.exp((whole - sums).to(tl.float32))
    return sums, tl.exp(sums.to(tl.float32)), until_end, tl.exp(whole.to(tl.float32))


@triton.jit
def lower_decays(sums, CHUNK: tl.constexpr):
    """Return D [C, C], float32.

    The difference of two long sums in float32 would lose precision. Each sum is therefore split into a float32 number
    and a rest, so that [C, C] numbers in float64 are not needed.
    """
    i = tl.arange(0, CHUNK)
    high = sums.to(tl.float32)
    rest = (sums - high.to(tl.float64)).to(tl.float32)
    difference = (high[:, None] - high[None, :]) + (rest[:, None] - rest[None, :])
    return tl.exp(tl.where(i[:, None] >= i[None, :], difference, float("-inf")))


@triton.jit
def unit_lower_inverse(a, CHUNK: tl.constexpr):
    """Return (I + A)^-1 for the strictly lower triangular A [C, C], float32.

    If T has the inverses of the diagonal blocks of b rows, T - T A' T has the inverses of the blocks of 2 b rows, where
    A' is the part of A to the left of every second block. Doubling the blocks is as stable as a triangular solve.
    """
    i = tl.arange(0, CHUNK)
    row, column = i[:, None], i[None, :]
    inverse = tl.where(row == column, 1.0, 0.0)
    level = 0
    while 1 << level < CHUNK:
        is_part = (row >> level + 1 == column >> level + 1) & (row >> level > column >> level)
        part = tl.where(is_part, a, 0.0)
        left = tl.dot(inverse, part, input_precision="tf32x3")
        inverse -= tl.dot(left, inverse, input_precision="tf32x3")
        level += 1
    return inverse
