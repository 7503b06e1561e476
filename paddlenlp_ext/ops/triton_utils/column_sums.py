"""Triton kernel that sums columns, the second step of weight gradients; independent of Paddle and PyTorch.

Each program of a backward kernel writes a row of partial sums. The kernel of this module adds the rows in a fixed
order, so that gradients are bitwise reproducible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from paddlenlp_ext.ops.triton_utils.tile_sizes import TileSizes, fills_threads

# A program reads ROWS rows at a time and sums COLUMNS columns. One memory transaction reads 8 columns.
SIZES = TileSizes(
    "column_sums",
    (),
    fills_threads("ROWS", "COLUMNS"),
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
    """Sum COLUMNS columns over `num_rows` rows, starting at `first_row`."""
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
    """Sum `num_rows` rows (None: all rows) of `partials`, float32 [rows, D], and write the sums to `out` [D]."""
    rows, size = partials.shape
    sizes, count = SIZES(partials), rows if num_rows is None else num_rows
    launch(column_sums_kernel, (triton.cdiv(size, sizes["COLUMNS"]),), partials, out, first_row, count, size, **sizes)
