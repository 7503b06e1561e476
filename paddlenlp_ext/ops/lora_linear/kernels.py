"""Triton kernels of the LoRA linear layer; independent of Paddle and PyTorch.

    one pass      y[n, c] = x[n] . W[c] + bias[c] + s sum_k u[n, k] B[c, k],      u[n, k] = x[n] . A[k]
    add           y[n, c] += s sum_k u[n, k] F[k, c]              in place; sums are float32, rounded once
    gradients     v[n, k] = sum_c dy[n, c] B[c, k]   and   dB[c, k] = sum_n dy[n, c] u[n, k],   in one read of dy

The gradient kernel sums over the columns of dy for v, and over the rows of dy for dB. Each program reads a block of dy
and writes partial sums of v and dB, which the caller adds up. The order of summation is fixed.

A program of the one-pass kernel multiplies tiles of x by tiles of W and A. x and W are read once per tile of y, and W
is dequantized in registers. Every program computes u for its rows; only the programs of the first columns store u. Sums
are float32, u is rounded to the dtype of x before the product with B, and y is rounded once. For few positions, reading
W takes most of the time. To read W in parallel, WAYS warps of a program multiply different slices of the inputs. The
sums of the warps are added at the end in a fixed order.

Tested in Triton's interpreter (tests/ops/lora_linear/test_triton.py).

Names: N rows, C columns, K rank, I inputs; F is B^T in the forward pass and A in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from paddlenlp_ext.ops.grouped_linear.kernels import banded_tile
from paddlenlp_ext.ops.triton_utils.tile_sizes import TileSizes
from paddlenlp_ext.ops.triton_utils.weight_tiles import Format, Layer, load_weights

_SMALLEST, _TERMS = 16, 64
"""Smallest tile size that tensor cores support, and number of terms that `add_low_rank_kernel` reads at a time."""
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
    ROWS=(32, 64),  # rows of dy read at a time
    COLUMNS=(64, 128, 256, 512),
    PROGRAMS=(132, 264, 528),  # target number of programs
    num_warps=(4, 8),
    num_stages=(2, 3),
)


def _is_one_pass(entry: dict[str, int]) -> bool:
    """Return whether a launch with these tile sizes is valid, reads W once, and has 8 to 96 accumulators per thread."""
    rows, warps, ways = (entry[name] for name in ("ROWS", "num_warps", "WAYS"))
    has_codes = entry.get("bits") != 0
    sums = ways * rows * (entry["COLUMNS"] + _rank_tile(entry.get("rank", LARGEST_RANK))) // (32 * warps)
    divides = ways == 1 or (ways == warps and (rows == 16 or (rows == 64 and has_codes)))
    span = entry["SPAN"] * entry.get("element_size", 4)
    is_whole = rows == entry.get("rows", max(ONE_PASS_SIZES.choices["ROWS"]))
    return (
        is_whole and divides and 8 <= sums <= 96 and span in (128, 256) and not (has_codes and entry["num_stages"] > 1)
    )


LARGEST_RANK = 64
"""Largest rank that `lora_linear_kernel` supports."""
ONE_PASS_SIZES = TileSizes(
    "lora_linear",
    ("bits", "element_size", "rank", "rows"),
    _is_one_pass,
    ROWS=(16, 64, 128),
    COLUMNS=(16, 32, 64, 128),
    WAYS=(1, 4, 8),  # input slices that are multiplied in parallel
    SPAN=(32, 64, 128),  # inputs per slice that are read at a time
    BAND=(8,),  # number of row tiles with adjacent programs, which share x and W in the cache
    num_warps=(4, 8),
    num_stages=(1, 3),
)


@triton.jit
def lora_linear_kernel(
    x,  # [N, I]
    matrix,  # W [C, I]; see `Layer`
    scales,
    group_scales,
    offset,
    levels,  # see `Format`
    scale_levels,
    bias,  # [C]
    a,  # A [K, I]
    b,  # B [C, K]
    y,  # [N, C]
    inner,  # u [N, K]
    scaling,  # s
    num_rows,
    num_columns,
    num_inputs,
    rank,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WAYS: tl.constexpr,
    SPAN: tl.constexpr,
    BAND: tl.constexpr,
    RANK: tl.constexpr,  # K or more
):
    """Compute a tile of y; the programs of the first columns also store u."""
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS)
    row_tile, column_tile = banded_tile(tl.program_id(0), row_tiles, column_tiles, BAND)
    n, c = row_tile * ROWS + tl.arange(0, ROWS), column_tile * COLUMNS + tl.arange(0, COLUMNS)
    k, way = tl.arange(0, RANK), tl.arange(0, WAYS)
    is_row, is_column, is_term = n < num_rows, c < num_columns, k < rank
    n = n.to(tl.int64)
    of_x, of_a, of_w = _down(n, WAYS) * num_inputs, _down(k, WAYS) * num_inputs, c.to(tl.int64) * num_inputs
    if WAYS == 1:
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        u = tl.zeros((ROWS, RANK), dtype=tl.float32)
    else:
        total = tl.zeros((WAYS, ROWS, COLUMNS), dtype=tl.float32)
        u = tl.zeros((WAYS, ROWS, RANK), dtype=tl.float32)
    for begin in range(0, num_inputs, WAYS * SPAN):
        first = begin + way * SPAN
        if WAYS == 1:
            i = begin + tl.arange(0, SPAN)[None, :]
        else:
            i = first[:, None, None] + tl.arange(0, SPAN)[None, None, :]
        is_input = i < num_inputs
        own_x = tl.load(x + of_x + i, mask=_down(is_row, WAYS) & is_input, other=0.0)
        own_a = tl.load(a + of_a + i, mask=_down(is_term, WAYS) & is_input, other=0.0)
        if BITS == 0 and WAYS == 1:  # a load with two axes lets the compiler copy the tile to shared memory early
            own_w = tl.load(matrix + of_w[:, None] + i, mask=is_column[:, None] & is_input, other=0.0)
        else:
            own_w = load_weights(
                matrix, scales, scale_levels, group_scales, offset, levels, of_w[None, :, None], first,
                is_column[None, :, None], num_inputs, BITS, BLOCK, GROUP, UNIT, SPAN,
            )  # fmt: skip
            if WAYS == 1:
                own_w = own_w.reshape((COLUMNS, SPAN))
        total = _add_product(own_x, own_w, total, WAYS)
        u = _add_product(own_x, own_a, u, WAYS)
    if WAYS > 1:
        total, u = tl.sum(total, axis=0), tl.sum(u, axis=0)
    rounded = u.to(x.dtype.element_ty)
    if column_tile == 0:
        tl.store(inner + n[:, None] * rank + k[None, :], rounded, mask=is_row[:, None] & is_term[None, :])
    of_b = b + c[None, :].to(tl.int64) * rank + k[:, None]
    own_b = tl.load(of_b, mask=is_term[:, None] & is_column[None, :], other=0.0).to(x.dtype.element_ty)
    total += tl.dot(rounded, own_b, input_precision="ieee") * scaling
    if HAS_BIAS:
        total += tl.load(bias + c, mask=is_column, other=0.0).to(tl.float32)[None, :]
    inside = is_row[:, None] & is_column[None, :]
    tl.store(y + n[:, None] * num_columns + c[None, :], total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _down(index, WAYS: tl.constexpr):
    """Reshape row indices for broadcasting: [R, 1], or [1, R, 1] if WAYS > 1."""
    if WAYS == 1:
        return index[:, None]
    else:  # an explicit else lets the compiler drop the other branch
        return index[None, :, None]


@triton.jit
def _add_product(left, right, total, WAYS: tl.constexpr):
    """Return `total` plus left right^T, batched if WAYS > 1; `right` is cast to the dtype of `left`."""
    right = right.to(left.dtype)
    if WAYS == 1:
        return tl.dot(left, tl.trans(right), total, input_precision="ieee")
    else:
        return tl.dot(left, tl.trans(right, 0, 2, 1), total, input_precision="ieee")


@triton.jit
def add_low_rank_kernel(
    y,  # [N, C]
    inner,  # u [N, K]
    factor,  # F [K, C], with any strides
    scaling,  # s
    num_rows,
    num_columns,
    rank,
    rank_stride,  # strides of F, in elements
    column_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,  # number of terms of a sum that are read at a time
):
    """Add the product s u F to a tile of y, in place."""
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
    row_parts,  # float32 [ceil(C / COLUMNS), N, K], partial sums of v
    column_parts,  # float32 [ceil(N / span), C, K], partial sums of dB
    num_rows,
    num_columns,
    rank,
    span,  # rows per program, a multiple of ROWS
    ROWS: tl.constexpr,  # rows read at a time
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,  # K or more
):
    """Compute partial sums of v and dB for `span` rows and COLUMNS columns of dy."""
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


def launch_lora_linear(
    launch: Callable[..., None], x: Any, layer: Layer, form: Format, a: Any, b: Any, scaling: float, inner: Any
) -> None:
    """Launch the one-pass kernel on contiguous tensors to compute y and u.

    Args:
        launch: function that takes a kernel, its grid, its arguments and its constants.
        x: [..., I].
        layer: tensors of the base layer, including the output tensor `y` [..., C].
        form: weight format of the base layer.
        a: A [K, I] in any floating dtype; rounded to the dtype of x.
        b: B [C, K] in any floating dtype; rounded to the dtype of x.
        scaling: factor s of the update.
        inner: u [N, K] in the dtype of x; written.
    """
    (num_rows, rank), num_inputs, num_columns = inner.shape, x.shape[-1], layer.y.shape[-1]
    sizes = ONE_PASS_SIZES(x, bits=form.bits, element_size=x.element_size(), rank=rank, rows=num_rows)
    grid = (triton.cdiv(num_rows, sizes["ROWS"]) * triton.cdiv(num_columns, sizes["COLUMNS"]),)
    stored = layer.matrix, layer.scales, layer.group_scales, layer.offset, form.levels, form.scale_levels
    numbers = scaling, num_rows, num_columns, num_inputs, rank
    sizes |= form.constants(num_inputs, sizes["SPAN"]) | {"HAS_BIAS": layer.bias is not None, "RANK": _rank_tile(rank)}
    launch(lora_linear_kernel, grid, x, *stored, layer.bias, a, b, layer.y, inner, *numbers, **sizes)


def launch_add_low_rank(
    launch: Callable[..., None], y: Any, inner: Any, factor: Any, scaling: float, strides: tuple[int, int]
) -> None:
    """Add `s u F` to y [..., C] in place; `strides` are the strides of `factor` (F) along K and C."""
    (num_rows, rank), num_columns = inner.shape, y.shape[-1]
    sizes = {**ADD_SIZES(y, element_size=y.element_size()), "RANK": min(_TERMS, _rank_tile(rank))}
    grid = (triton.cdiv(num_columns, sizes["COLUMNS"]), triton.cdiv(num_rows, sizes["ROWS"]))
    launch(add_low_rank_kernel, grid, y, inner, factor, scaling, num_rows, num_columns, rank, *strides, **sizes)


def launch_low_rank_gradients(
    launch: Callable[..., None], empty: Callable[[list[int]], Any], gradient: Any, inner: Any, factor: Any
) -> tuple[Any, Any]:
    """Return the partial sums of v [column tiles, N, K] and of dB [row tiles, C, K].

    Args:
        launch: function that runs a kernel.
        empty: function that creates a float32 tensor with the given shape.
        gradient: dy [N, C], contiguous.
        inner: u [N, K], contiguous.
        factor: B [C, K], contiguous.
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
