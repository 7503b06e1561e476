"""Sums of the columns of a matrix, the second step of weight gradients; independent of Paddle and PyTorch.

The programs of a backward pass write partial sums, one row each. This kernel adds them in a fixed order, so that the
gradient has the same bits in every run; sums by atomic additions would not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from paddlenlp_ext.ops.triton_utils.tile_sizes import TileSizes

# ROWS that a program reads at a time, and its COLUMNS, of which 8 are a memory transaction.
SIZES = TileSizes(
    "column_sums",
    (),
    lambda entry: 8 <= entry["ROWS"] * entry["COLUMNS"] // (32 * entry["num_warps"]) <= 32,
    ROWS=(32, 64, 128),
    COLUMNS=(8, 16, 32, 64),
    num_warps=(4, 8),
)


@triton.jit
def column_sums_kernel(
    partials,  # float32 [rows, D]
    out,  # [D]
    first_row,
    num_rows,
    size,  # D
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum the rows from `first_row` on, for COLUMNS columns."""
    d = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = d < size
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for begin in range(0, num_rows, ROWS):
        r = begin + tl.arange(0, ROWS)
        at = (first_row + r)[:, None].to(tl.int64) * size + d[None, :]
        total += tl.load(partials + at, mask=(r < num_rows)[:, None] & is_column[None, :], other=0.0)
    tl.store(out + d, tl.sum(total, axis=0).to(out.dtype.element_ty), mask=is_column)


def launch_column_sums(
    launch: Callable[..., None], partials: Any, out: Any, first_row: int = 0, num_rows: int | None = None
) -> None:
    """Write to `out` [D] the sums over `num_rows` rows (None: all) of `partials`, float32 [rows, D]."""
    rows, size = partials.shape
    sizes, count = SIZES(partials), rows if num_rows is None else num_rows
    launch(column_sums_kernel, (triton.cdiv(size, sizes["COLUMNS"]),), partials, out, first_row, count, size, **sizes)
