"""Triton kernels of RMS norm, their tile sizes and their launches; independent of Paddle and PyTorch.

    forward     s = x + addend                 y = n w,    n = s / rms,    rms = sqrt(mean(s^2) + epsilon)
    backward    ds = (g w - n mean(g w n)) / rms + gradient of s        dw = sum over rows of g n

The sum x + addend is rounded to its dtype and then normalized, so that the backward pass computes the same n from the
saved sum. All other values are float32. The backward pass reads s and recomputes rms from s.

In the backward pass, each program sums the weight gradient over adjacent rows, and a second kernel adds these partial
sums (ops/triton_utils/column_sums.py). With a frozen weight, a program handles a single tile.

Tested in Triton's interpreter (tests/ops/rms_norm/test_triton.py).

Names: R rows, D row length, w = offset + weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from paddlenlp_ext.ops.triton_utils.tile_sizes import TileSizes, fills_threads

LARGEST = 65536
"""Largest supported row length."""


def _is_full(entry: dict[str, int]) -> bool:
    """Return whether these tile sizes fill the threads; a row may be longer with 32 warps, the maximum."""
    is_long_row = entry["ROWS"] == 1 and entry["num_warps"] == 32 and entry.get("columns", LARGEST) > 32 * 32 * 32
    return is_long_row or fills_threads("ROWS", columns=LARGEST)(entry)


FORWARD_SIZES = TileSizes(
    "rms_norm_forward", ("columns",), _is_full, ROWS=(1, 2, 4, 8, 16, 32), num_warps=(2, 4, 8, 16, 32)
)
BACKWARD_SIZES = TileSizes(
    "rms_norm_backward",
    ("columns",),
    _is_full,
    ROWS=(1, 2, 4, 8, 16, 32),
    PROGRAMS=(132, 264, 528),  # largest number of partial sums of the weight gradient
    num_warps=(2, 4, 8, 16, 32),
)


@triton.jit
def rms_norm_forward_kernel(
    x,  # [R, D], rows `x_stride` apart
    addend,  # [R, D], read only if ADDS
    weight,  # [D]
    total,  # x + addend [R, D], written only if ADDS
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
    total_gradient,  # [R, D], added to the result if ADDS
    x_gradient,  # [R, D]
    partials,  # float32 [programs, D], sums for the weight gradient, written only if SUMS
    num_rows,  # R
    size,  # D
    x_stride,
    epsilon,
    offset,
    num_tiles,  # tiles per program
    ADDS: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the input gradient of consecutive rows, and a partial sum of the weight gradient."""
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


def num_partials(x: Any) -> int:
    """Return the number of partial sums of the weight gradient, one per program of the backward pass."""
    tiles, per_program, _ = _split(x)
    return triton.cdiv(tiles, per_program)


def _split(x: Any) -> tuple[int, int, dict[str, int]]:
    """Return the number of tiles, the tiles per program, and the tile sizes of a backward pass with weight gradient."""
    sizes = _sizes(BACKWARD_SIZES, x)
    tiles = triton.cdiv(math.prod(x.shape[:-1]), sizes["ROWS"])
    return tiles, max(1, triton.cdiv(tiles, sizes.pop("PROGRAMS"))), sizes


def _sizes(table: TileSizes, x: Any) -> dict[str, int]:
    """Return the tile sizes for x [..., D]; a tile of COLUMNS columns covers a whole row.

    Raises:
        ValueError: the rows are longer than the kernels support.
    """
    size = x.shape[-1]
    if size > LARGEST:
        raise ValueError(f"rms_norm: rows of {size} elements; the Triton kernels support at most {LARGEST}")
    return {"COLUMNS": triton.next_power_of_2(size), **table(x, columns=size)}


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
        launch: function that takes a kernel, its grid, its arguments and its constants.
        x: [..., D], with rows `x_stride` elements apart. All tensors except x are contiguous.
        weight: [D].
        out: norm of `x`, or of `x + addend` [..., D]; written.
        epsilon, offset: constants of the formula.
        addend: [..., D], added to x before the norm, or None.
        total: output tensor for x + addend, [..., D]; None without an addend.
    """
    num_rows, size = math.prod(x.shape[:-1]), x.shape[-1]
    sizes, adds = _sizes(FORWARD_SIZES, x), addend is not None
    tensors = (x, addend if adds else x, weight, total if adds else out, out)
    grid, numbers = (triton.cdiv(num_rows, sizes["ROWS"]),), (num_rows, size, x_stride, epsilon, offset)
    launch(rms_norm_forward_kernel, grid, *tensors, *numbers, ADDS=adds, **sizes)


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
    """Launch the backward pass; the other arguments are described in `launch_forward`.

    Args:
        gradient: gradient of the norm's output, [..., D].
        x: input of the norm: x + addend if there was an addend.
        total_gradient: gradient of x + addend, [..., D]; None without an addend.
        x_gradient: gradient of x and of the addend, [..., D]; written.
        partials: float32 [num_partials, D], written; the column sums are the weight gradient. None: frozen weight.
    """
    num_rows, size = math.prod(x.shape[:-1]), x.shape[-1]
    adds, sums = total_gradient is not None, partials is not None
    tiles, per_program, sizes = _split(x)
    per_program = per_program if sums else 1
    tensors = (gradient, x, weight, total_gradient if adds else gradient, x_gradient, partials if sums else x_gradient)
    grid, numbers = (triton.cdiv(tiles, per_program),), (num_rows, size, x_stride, epsilon, offset, per_program)
    launch(rms_norm_backward_kernel, grid, *tensors, *numbers, ADDS=adds, SUMS=sums, **sizes)
