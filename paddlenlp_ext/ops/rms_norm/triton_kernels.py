"""Triton kernels of the RMS norm and their launches; independent of Paddle and PyTorch.

    forward     s = x + addend                 y = n w,    n = s / rms,    rms = sqrt(mean(s^2) + epsilon)
    backward    ds = (g w - n mean(g w n)) / rms + gradient of s        dw = sum over rows of g n

x + addend is rounded to its dtype before it is normalized, so that the backward pass computes the same n from the saved
sum. Everything else is float32. The backward pass computes rms again: it reads s anyway.

The gradient of the weight is a sum over programs, each of which sums neighbouring rows (ops/triton_column_sums.py).
With a frozen weight, a program of the backward pass handles a single tile.

Tested in Triton's interpreter (tests/ops/rms_norm/test_triton.py).

Names: R rows, D row length, w = offset + weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl


class Tile(NamedTuple):
    """Sizes of a program for rows of at most `columns` elements.

    Attributes:
        columns: length to which rows are padded, a power of two.
        rows: rows of a tile.
        warps: warps of a program.
        programs: largest number of partial sums of the weight gradient.
    """

    columns: int
    rows: int
    warps: int
    programs: int


# Chosen for 16 elements a thread; not measured yet (benchmarks/triton_ops.py).
TILES = (
    Tile(64, 32, 4, 256),
    Tile(128, 16, 4, 256),
    Tile(256, 8, 4, 256),
    Tile(512, 4, 4, 256),
    Tile(1024, 2, 4, 256),
    Tile(2048, 1, 4, 256),
    Tile(4096, 1, 8, 256),
    Tile(8192, 1, 16, 128),
    Tile(16384, 1, 16, 128),
    Tile(32768, 1, 32, 128),
    Tile(65536, 1, 32, 128),
)


@triton.jit
def rms_norm_forward_kernel(
    x,  # [R, D], rows `x_stride` apart
    addend,  # [R, D], read with ADDS
    weight,  # [D]
    total,  # x + addend [R, D], written with ADDS
    out,  # [R, D]
    num_rows,  # R
    size,  # D
    x_stride,
    epsilon,
    offset,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Normalize ROWS rows."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, COLUMNS)[None, :]
    inside = (r < num_rows)[:, None] & (d < size)
    r = r.to(tl.int64)[:, None]
    at = r * size + d
    s = tl.load(x + r * x_stride + d, mask=inside, other=0.0)
    if ADDS:
        s = s.to(tl.float32) + tl.load(addend + at, mask=inside, other=0.0).to(tl.float32)
        s = s.to(total.dtype.element_ty)
        tl.store(total + at, s, mask=inside)
    s = s.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(s * s, axis=1) / size + epsilon)[:, None]
    w = tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32) + offset
    tl.store(out + at, (s * inverse * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward_kernel(
    gradient,  # gradient of the norm [R, D]
    x,  # input of the norm [R, D], rows `x_stride` apart
    weight,  # [D]
    total_gradient,  # [R, D], added to the result with ADDS
    x_gradient,  # [R, D]
    partials,  # float32 [programs, D], sums for the weight gradient, written with SUMS
    num_rows,  # R
    size,  # D
    x_stride,
    epsilon,
    offset,
    num_tiles,  # tiles of a program
    ADDS: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the gradient of consecutive rows, and their part of the weight gradient."""
    program = tl.program_id(0)
    d = tl.arange(0, COLUMNS)[None, :]
    w = tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32) + offset
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for tile in range(program * num_tiles, (program + 1) * num_tiles):
        r = tile * ROWS + tl.arange(0, ROWS)
        inside = (r < num_rows)[:, None] & (d < size)
        r = r.to(tl.int64)[:, None]
        at = r * size + d
        s = tl.load(x + r * x_stride + d, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(s * s, axis=1) / size + epsilon)[:, None]
        n = s * inverse
        if SUMS:
            sums += g * n
        g = g * w
        mean = (tl.sum(g * n, axis=1) / size)[:, None]
        result = (g - n * mean) * inverse
        if ADDS:
            result += tl.load(total_gradient + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(x_gradient + at, result.to(x_gradient.dtype.element_ty), mask=inside)
    if SUMS:
        tl.store(partials + program * size + d, tl.sum(sums, axis=0)[None, :], mask=d < size)


def tile_for(size: int) -> Tile:
    """Return the sizes for rows of `size` elements.

    Raises:
        ValueError: the rows are longer than any that the kernels support.
    """
    for tile in TILES:
        if size <= tile.columns:
            return tile
    raise ValueError(f"rms_norm: rows of {size} elements; the Triton kernels support at most {TILES[-1].columns}")


def num_partials(num_rows: int, size: int) -> int:
    """Return the number of partial sums of a weight gradient: that of the backward pass's programs."""
    tile = tile_for(size)
    tiles = triton.cdiv(num_rows, tile.rows)
    return triton.cdiv(tiles, _tiles_per_program(tiles, tile))


def _tiles_per_program(tiles: int, tile: Tile) -> int:
    return max(1, triton.cdiv(tiles, tile.programs))


def launch_forward(
    launch: Callable[..., None],
    x: Any,
    x_stride: int,
    weight: Any,
    out: Any,
    epsilon: float,
    offset: float,
    addend: Any = None,
    total: Any = None,
) -> None:
    """Launch the forward pass.

    Args:
        launch: function of a kernel, its grid, its arguments and its constants.
        x: [..., D], with rows `x_stride` elements apart. All other tensors are contiguous.
        weight: [D].
        out: norm of `x`, or of `x + addend` [..., D]; written.
        epsilon, offset: numbers of the formula.
        addend, total: summand and sum [..., D]; the sum is written. None: nothing is added.
    """
    num_rows, size = math.prod(x.shape[:-1]), x.shape[-1]
    tile, adds = tile_for(size), addend is not None
    tensors = (x, addend if adds else x, weight, total if adds else out, out)
    sizes = {"ADDS": adds, "ROWS": tile.rows, "COLUMNS": tile.columns, "num_warps": tile.warps}
    grid = (triton.cdiv(num_rows, tile.rows),)
    launch(rms_norm_forward_kernel, grid, *tensors, num_rows, size, x_stride, epsilon, offset, **sizes)


def launch_backward(
    launch: Callable[..., None],
    gradient: Any,
    x: Any,
    x_stride: int,
    weight: Any,
    x_gradient: Any,
    epsilon: float,
    offset: float,
    total_gradient: Any = None,
    partials: Any = None,
) -> None:
    """Launch the backward pass; arguments as for `launch_forward`.

    Args:
        gradient: gradient of the norm, [..., D].
        x: input of the norm: the sum, if there was an addend.
        total_gradient: gradient of the sum, [..., D]; None without an addend.
        x_gradient: gradient of x, and of the addend [..., D]; written.
        partials: float32 [num_partials, D], written; its column sums are the weight gradient. None: a frozen weight.
    """
    num_rows, size = math.prod(x.shape[:-1]), x.shape[-1]
    tile, adds, sums = tile_for(size), total_gradient is not None, partials is not None
    tiles = triton.cdiv(num_rows, tile.rows)
    per_program = _tiles_per_program(tiles, tile) if sums else 1
    tensors = (gradient, x, weight, total_gradient if adds else gradient, x_gradient, partials if sums else x_gradient)
    sizes = {"ADDS": adds, "SUMS": sums, "ROWS": tile.rows, "COLUMNS": tile.columns, "num_warps": tile.warps}
    numbers = num_rows, size, x_stride, epsilon, offset, per_program
    launch(rms_norm_backward_kernel, (triton.cdiv(tiles, per_program),), *tensors, *numbers, **sizes)
