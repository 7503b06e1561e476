"""Triton kernels of the grouped linear layer; independent of Paddle and PyTorch.

    product            y[n, c] = sum_k x[n, k] W[g, c, k]          g: group of row n; W may have any strides
    weight gradient    dW[g, o, i] = sum_n dy[n, o] x[n, i]        n: rows of group g; 0 without rows

One launch computes all groups. A program of the product computes one tile of y: up to ROWS rows of one group, listed in
`tiles`, and COLUMNS columns. A program of the weight gradient computes one tile of the gradient of one group, and reads
all rows of the group in order. Each element of a result is written once, and the order of summation is fixed. Sums are
float32.

Tested in Triton's interpreter (tests/ops/grouped_linear/test_triton.py).

Names: N rows, G groups, O outputs, I inputs, K terms of a sum, C columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from paddlenlp_ext.ops.triton_utils.tile_sizes import TileSizes


def _fits(entry: dict[str, int], rows: int, columns: int, terms: int) -> bool:
    """Return whether a thread has 8 to 128 accumulators, and a program reads 128 bytes of each row at a time."""
    per_thread = rows * columns // (32 * entry["num_warps"])
    return 8 <= per_thread <= 128 and terms * entry.get("element_size", 4) == 128


PRODUCT_SIZES = TileSizes(
    "grouped_product",
    ("element_size", "rows"),
    lambda entry: (
        entry["ROWS"] == entry.get("rows", 128) and _fits(entry, entry["ROWS"], entry["COLUMNS"], entry["TERMS"])
    ),
    ROWS=(16, 32, 64, 128),
    COLUMNS=(64, 128, 256),
    TERMS=(32, 64),
    BAND=(8,),
    num_warps=(4, 8),
    num_stages=(2, 3, 4),
)
"""Tile sizes of the product. Tile sizes depend on `rows`, the mean number of rows of non-empty groups."""
WEIGHT_GRADIENT_SIZES = TileSizes(
    "grouped_weight_gradient",
    ("element_size",),
    lambda entry: _fits(entry, entry["OUTPUTS"], entry["INPUTS"], entry["ROWS"]),
    OUTPUTS=(64, 128),
    INPUTS=(64, 128, 256),
    ROWS=(32, 64),
    num_warps=(4, 8),
    num_stages=(2, 3, 4),
)
_SMALLEST = 16
"""Smallest tile side that tensor cores support."""


@triton.jit
def grouped_product_kernel(
    x,  # [N, K]
    weight,  # W, with any strides
    y,  # [N, C]
    tiles,  # int32 [num_tiles, 3]: group, first row, end row (exclusive)
    num_tiles,
    num_columns,  # C
    num_terms,  # K
    group_stride,  # strides of W, in elements
    column_stride,
    term_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
    BAND: tl.constexpr,  # number of row tiles with adjacent programs, which share x and W in the cache
):
    """Compute a tile of y."""
    tile, column_tile = banded_tile(tl.program_id(0), num_tiles, tl.cdiv(num_columns, COLUMNS), BAND)
    group = tl.load(tiles + tile * 3).to(tl.int64)
    n = tl.load(tiles + tile * 3 + 1) + tl.arange(0, ROWS)
    is_row = n < tl.load(tiles + tile * 3 + 2)
    n = n.to(tl.int64)
    c = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    is_column = c < num_columns
    x_rows = x + n[:, None] * num_terms
    w_columns = weight + group * group_stride + c[None, :].to(tl.int64) * column_stride
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for begin in range(0, num_terms, TERMS):
        k = begin + tl.arange(0, TERMS)
        is_term = k < num_terms
        own_x = tl.load(x_rows + k[None, :], mask=is_row[:, None] & is_term[None, :], other=0.0)
        own_w = tl.load(w_columns + k[:, None] * term_stride, mask=is_term[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(own_x, own_w, total, input_precision="ieee")
    tl.store(
        y + n[:, None] * num_columns + c[None, :],
        total.to(y.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )


@triton.jit
def banded_tile(program, row_tiles, column_tiles, BAND: tl.constexpr):
    """Return the row tile and the column tile of a program; the programs of BAND row tiles are adjacent."""
    first_tile = program // (BAND * column_tiles) * BAND
    height = tl.minimum(row_tiles - first_tile, BAND)
    within = program % (BAND * column_tiles)
    return first_tile + within % height, within // height


@triton.jit
def grouped_weight_gradient_kernel(
    gradient,  # dy [N, O]
    x,  # [N, I]
    out,  # dW [G, O, I]
    starts,  # int32 [G + 1], the first row of each group, and N
    num_outputs,  # O
    num_inputs,  # I
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute a tile of the weight gradient of one group."""
    output_tiles, input_tiles = tl.cdiv(num_outputs, OUTPUTS), tl.cdiv(num_inputs, INPUTS)
    program = tl.program_id(0)
    group = program // (output_tiles * input_tiles)
    tile = program % (output_tiles * input_tiles)
    o = tile % output_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    i = tile // output_tiles * INPUTS + tl.arange(0, INPUTS)
    is_output, is_input = o < num_outputs, i < num_inputs
    last = tl.load(starts + group + 1)
    total = tl.zeros((OUTPUTS, INPUTS), dtype=tl.float32)
    for begin in range(tl.load(starts + group), last, ROWS):
        n = begin + tl.arange(0, ROWS)
        is_row = n < last
        n = n.to(tl.int64)
        mask = is_output[:, None] & is_row[None, :]
        own_gradient = tl.load(gradient + n[None, :] * num_outputs + o[:, None], mask=mask, other=0.0)
        own_x = tl.load(x + n[:, None] * num_inputs + i[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        total = tl.dot(own_gradient, own_x, total, input_precision="ieee")
    own_rows = out + group.to(tl.int64) * num_outputs * num_inputs + o[:, None].to(tl.int64) * num_inputs
    tl.store(own_rows + i[None, :], total.to(out.dtype.element_ty), mask=is_output[:, None] & is_input[None, :])


def product_sizes(x: Any, rows: int, columns: int) -> dict[str, int]:
    """Return the tile sizes for x [N, K] with C output columns and a mean of `rows` rows per group."""
    sizes = PRODUCT_SIZES(x, element_size=x.element_size(), rows=rows)
    return sizes | {"COLUMNS": _side(columns, sizes["COLUMNS"]), "TERMS": _side(x.shape[1], sizes["TERMS"])}


def launch_product(
    launch: Callable[..., None],
    x: Any,
    weight: Any,
    y: Any,
    tiles: Any,
    strides: tuple[int, int],
    sizes: dict[str, int],
) -> None:
    """Launch the product kernel.

    Args:
        launch: function that takes a kernel, its grid, its arguments and its constants.
        x: [N, K], contiguous.
        weight: [G, O, I], contiguous.
        y: [N, C]; written.
        tiles: int32 [num_tiles, 3], each with at most `sizes["ROWS"]` rows.
        strides: strides of W along C and K.
        sizes: result of `product_sizes`.
    """
    (num_tiles, _), columns = tiles.shape, y.shape[1]
    numbers = num_tiles, columns, x.shape[1], weight.shape[1] * weight.shape[2], *strides
    grid = (num_tiles * triton.cdiv(columns, sizes["COLUMNS"]),)
    launch(grouped_product_kernel, grid, x, weight, y, tiles, *numbers, **sizes)


def launch_weight_gradient(launch: Callable[..., None], gradient: Any, x: Any, out: Any, starts: Any) -> None:
    """Launch the weight gradient kernel on contiguous tensors, and write the gradient to `out`."""
    (groups, outputs, inputs), sizes = out.shape, WEIGHT_GRADIENT_SIZES(x, element_size=x.element_size())
    sizes |= {"OUTPUTS": _side(outputs, sizes["OUTPUTS"]), "INPUTS": _side(inputs, sizes["INPUTS"])}
    grid = (groups * triton.cdiv(outputs, sizes["OUTPUTS"]) * triton.cdiv(inputs, sizes["INPUTS"]),)
    launch(grouped_weight_gradient_kernel, grid, gradient, x, out, starts, outputs, inputs, **sizes)


def _side(count: int, largest: int) -> int:
    """Return the tile size for `count` columns or terms: a power of two from `_SMALLEST` to `largest`."""
    return min(largest, max(_SMALLEST, triton.next_power_of_2(count)))
