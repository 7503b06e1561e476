"""Triton kernels of the products of groups of rows; independent of Paddle and PyTorch.

    product            y[n, c] = sum_k x[n, k] W[g, c, k]          g: group of row n; each with strides of its own
    weight gradient    dW[g, o, i] = sum_n dy[n, o] x[n, i]        n: rows of group g; 0 without rows

One launch computes all groups. A program of the product handles one tile of y: ROWS rows of one group, listed in
`tiles`, and COLUMNS columns. A program of the weight gradient handles one tile of one group, and reads all rows of the
group in order. Each element of a result is therefore written once, by sums in a fixed order. Sums are float32.

Tested in Triton's interpreter (tests/ops/test_grouped_triton.py).

Names: N rows, G groups, O outputs, I inputs, K terms of a sum, C columns.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped_product_kernel(
    x,  # [N, K]
    weight,  # W, of any strides
    y,  # [N, C]
    tiles,  # int32 [num_tiles, 3]: group, first row, and the row after the last one
    num_tiles,
    num_columns,  # C
    num_terms,  # K
    group_stride,  # strides of W, in elements
    column_stride,
    term_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
    BAND: tl.constexpr,  # tiles of rows whose programs are neighbours, so that they share x and W in the cache
):
    """Compute a tile of y."""
    column_tiles = tl.cdiv(num_columns, COLUMNS)
    program = tl.program_id(0)
    first_tile = program // (BAND * column_tiles) * BAND
    height = tl.minimum(num_tiles - first_tile, BAND)
    within = program % (BAND * column_tiles)
    tile = first_tile + within % height
    group = tl.load(tiles + tile * 3).to(tl.int64)
    n = tl.load(tiles + tile * 3 + 1) + tl.arange(0, ROWS)
    is_row = n < tl.load(tiles + tile * 3 + 2)
    n = n.to(tl.int64)
    c = within // height * COLUMNS + tl.arange(0, COLUMNS)
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
