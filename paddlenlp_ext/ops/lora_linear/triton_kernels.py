"""Triton kernels of the low-rank update of a linear layer; independent of Paddle and PyTorch.

    add           y[n, c] += s sum_k u[n, k] F[k, c]              in place; sums are float32, rounded once
    gradients     v[n, k] = sum_c dy[n, c] B[c, k]   and   dB[c, k] = sum_n dy[n, c] u[n, k],   in one read of dy

One sum of the second kernel runs over the columns of dy and the other over its rows. A program therefore handles some
rows of some columns, and writes its parts of both sums; the caller adds the parts. Each part is written once, and made
in a fixed order.

Tested in Triton's interpreter (tests/ops/lora_linear/test_triton.py).

Names: N rows, C columns, K rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from paddlenlp_ext.ops.tile_sizes import TileSizes

_SMALLEST, _TERMS = 16, 64
"""Smallest side of an operand of tensor cores, and terms of a sum of `add_low_rank_kernel` read at a time."""
ADD_SIZES = TileSizes(
    "add_low_rank",
    ("element_size",),
    lambda entry: 32 <= entry["ROWS"] * entry["COLUMNS"] // (32 * entry["num_warps"]) <= 64,
    ROWS=(32, 64, 128),
    COLUMNS=(64, 128, 256),
    num_warps=(4, 8),
)
GRADIENT_SIZES = TileSizes(
    "low_rank_gradients",
    ("element_size", "rank"),
    lambda entry: 1024 <= entry["COLUMNS"] * max(_SMALLEST, entry.get("rank", 32)) <= 8192,
    ROWS=(32, 64),  # of dy, read at a time
    COLUMNS=(64, 128, 256, 512),
    PROGRAMS=(132, 264, 528),  # to aim at
    num_warps=(4, 8),
    num_stages=(2, 3),
)


@triton.jit
def add_low_rank_kernel(
    y,  # [N, C]
    inner,  # u [N, K]
    factor,  # F [K, C], of any strides
    scaling,  # s
    num_rows,
    num_columns,
    rank,
    rank_stride,  # strides of F, in elements
    column_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,  # terms of a sum read at a time
):
    """Add s u F to a tile of y."""
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = n < num_rows, c < num_columns
    n = n.to(tl.int64)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for begin in range(0, rank, RANK):
        k = begin + tl.arange(0, RANK)
        is_term = k < rank
        u = tl.load(inner + n[:, None] * rank + k[None, :], mask=is_row[:, None] & is_term[None, :], other=0.0)
        at = factor + k[:, None] * rank_stride + c[None, :].to(tl.int64) * column_stride
        f = tl.load(at, mask=is_term[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(u, f, total, input_precision="ieee")
    inside = is_row[:, None] & is_column[None, :]
    at = y + n[:, None] * num_columns + c[None, :]
    sums = tl.load(at, mask=inside, other=0.0).to(tl.float32) + total * scaling
    tl.store(at, sums.to(y.dtype.element_ty), mask=inside)


@triton.jit
def low_rank_gradients_kernel(
    gradient,  # dy [N, C]
    inner,  # u [N, K]
    factor,  # B [C, K]
    row_parts,  # float32 [ceil(C / COLUMNS), N, K], the parts of v
    column_parts,  # float32 [ceil(N / span), C, K], the parts of dB
    num_rows,
    num_columns,
    rank,
    span,  # rows of a program, a multiple of ROWS
    ROWS: tl.constexpr,  # rows read at a time
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,  # K or more
):
    """Compute the parts of v and dB of `span` rows and COLUMNS columns."""
    column_tile, row_tile = tl.program_id(0), tl.program_id(1)
    c, k = column_tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, RANK)
    is_column, is_term = c < num_columns, k < rank
    own_factor = tl.load(factor + c[:, None] * rank + k[None, :], mask=is_column[:, None] & is_term[None, :], other=0.0)
    own_rows = row_parts + column_tile.to(tl.int64) * num_rows * rank
    total = tl.zeros((COLUMNS, RANK), dtype=tl.float32)
    first = row_tile * span
    last = tl.minimum(first + span, num_rows)
    for begin in range(first, last, ROWS):
        n = begin + tl.arange(0, ROWS)
        is_row = n < last
        n = n.to(tl.int64)
        inside = is_row[:, None] & is_column[None, :]
        own = tl.load(gradient + n[:, None] * num_columns + c[None, :], mask=inside, other=0.0)
        is_inner = is_row[:, None] & is_term[None, :]
        u = tl.load(inner + n[:, None] * rank + k[None, :], mask=is_inner, other=0.0)
        tl.store(
            own_rows + n[:, None] * rank + k[None, :], tl.dot(own, own_factor, input_precision="ieee"), mask=is_inner
        )
        total = tl.dot(tl.trans(own), u, total, input_precision="ieee")
    own_columns = column_parts + row_tile.to(tl.int64) * num_columns * rank
    tl.store(own_columns + c[:, None] * rank + k[None, :], total, mask=is_column[:, None] & is_term[None, :])


def launch_add_low_rank(
    launch: Callable[..., None], y: Any, inner: Any, factor: Any, scaling: float, strides: tuple[int, int]
) -> None:
    """Add `s u F` to y [..., C] in place; `strides` are those of F along K and C, whatever the shape of `factor`."""
    (num_rows, rank), num_columns = inner.shape, y.shape[-1]
    sizes = {**ADD_SIZES(y, element_size=y.element_size()), "RANK": min(_TERMS, _rank_tile(rank))}
    grid = (triton.cdiv(num_columns, sizes["COLUMNS"]), triton.cdiv(num_rows, sizes["ROWS"]))
    launch(add_low_rank_kernel, grid, y, inner, factor, scaling, num_rows, num_columns, rank, *strides, **sizes)


def launch_low_rank_gradients(
    launch: Callable[..., None], empty: Callable[[list[int]], Any], gradient: Any, inner: Any, factor: Any
) -> tuple[Any, Any]:
    """Return the parts of v [column tiles, N, K] and of dB [row tiles, C, K].

    Args:
        launch: function that runs a kernel.
        empty: function that makes a float32 tensor of a shape.
        gradient, inner, factor: dy [N, C], u [N, K] and B [C, K], contiguous.
    """
    (num_rows, num_columns), rank = gradient.shape, factor.shape[1]
    sizes = GRADIENT_SIZES(gradient, element_size=gradient.element_size(), rank=rank)
    rows, programs, column_tiles = sizes["ROWS"], sizes.pop("PROGRAMS"), triton.cdiv(num_columns, sizes["COLUMNS"])
    row_tiles = min(triton.cdiv(programs, column_tiles), triton.cdiv(num_rows, rows))
    span = triton.cdiv(num_rows, row_tiles * rows) * rows
    grid = (column_tiles, triton.cdiv(num_rows, span))
    parts = empty([column_tiles, num_rows, rank]), empty([grid[1], num_columns, rank])
    numbers = num_rows, num_columns, rank, span
    launch(low_rank_gradients_kernel, grid, gradient, inner, factor, *parts, *numbers, RANK=_rank_tile(rank), **sizes)
    return parts


def _rank_tile(rank: int) -> int:
    return max(_SMALLEST, triton.next_power_of_2(rank))
