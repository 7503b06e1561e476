"""Dequantize packed codes, any number of rows at a time.

    w[i] = level(code[i]) scale[i // block]        over the flattened weight, row by row
    w[i] = (level(code[i]) - zero[i // block]) scale[i // block]        integer formats with zero points
    scale[j] = dynamic(code8[j]) scale8[j // group] + offset        if the scales are quantized too

Source: Dettmers et al. 2023, QLoRA, arXiv:2305.14314. The CPU backends are C++ and NumPy, whose lookup is five times as
fast as Paddle's gather on the CPU. All backends return the same bits.

Shapes: N = out * in weights; B = ceil(N / block) scales; G = ceil(B / group).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import paddle

from paddlenlp_ext.ops.dispatch import DispatchedOp, on_cpu
from paddlenlp_ext.ops.quantized.codebooks import dynamic_levels, levels
from paddlenlp_ext.ops.quantized.cpu import dequantize_rows_cpp, usable_on_codes
from paddlenlp_ext.ops.quantized.triton_launch import dequantize_rows_triton, on_gpu_in_4_bits
from paddlenlp_ext.ops.quantized.weight import QuantizedStack, QuantizedWeight
from paddlenlp_ext.ops.quantized.zero_points import block_shifts
from paddlenlp_ext.paddle_compat import is_symbolic

_CHUNK = 1 << 20
"""Weights dequantized at a time on the CPU: 4 MB in float32."""

_CHUNK_GPU = 1 << 26
"""Weights dequantized at a time on a GPU, which small matmuls would leave mostly idle: 128 MB in half precision."""


def row_blocks(weight: QuantizedWeight, limit: int | None = None) -> Iterator[tuple[int, int]]:
    """Return (first row, end row) of consecutive parts, each of which begins at the start of a block and of a byte.

    A part has about `limit` weights (default: the best size for the device, and all in a static graph), but at least as
    many rows as a block needs to end at the end of a row.
    """
    if limit is None and is_symbolic(weight.codes):
        limit = weight.num_weights
    limit = limit or (_CHUNK_GPU if weight.codes.place.is_gpu_place() else _CHUNK)
    out, width = weight.shape
    aligned = math.lcm(weight.block_size, 2, width) // width
    step = aligned * max(1, limit // (aligned * width))
    return ((first, min(first + step, out)) for first in range(0, out, step))


def dequantize(weight: QuantizedWeight) -> paddle.Tensor:
    """Return the full weight, float32 [out, in]."""
    parts = [dequantize_rows(weight, first, last) for first, last in row_blocks(weight)]
    return parts[0] if len(parts) == 1 else paddle.concat(parts)


def dequantize_stack(stack: QuantizedStack) -> paddle.Tensor:
    """Return the full weights of all groups, float32 [G, O, I]."""
    indices = itertools.product(range(stack.shape[0]), range(stack.parts))
    return paddle.stack([dequantize(stack.matrix(*index)) for index in indices]).reshape(stack.shape)


@paddle.no_grad()
def dequantize_rows(
    weight: QuantizedWeight, first: int, last: int, dtype: paddle.dtype = paddle.float32
) -> paddle.Tensor:
    """Return the rows of one part of `row_blocks`, [last - first, in]."""
    rows = dequantize_op.choose(weight.codes)(weight, first, last, dtype if weight.is_plain else paddle.float32)
    if weight.zeros is not None:
        shifts_RG = block_shifts(weight)[first:last]
        rows = rows + paddle.repeat_interleave(shifts_RG, weight.block_size, axis=1)
    if weight.order is not None:
        rows = paddle.index_select(rows, weight.order.argsort(), axis=1)
    return rows if rows.dtype == dtype else rows.astype(dtype)


def block_scales(weight: QuantizedWeight, first: int, last: int) -> paddle.Tensor:
    """Return the float32 scales with indices `first` to `last` (exclusive)."""
    scales = weight.scales[first:last]
    if weight.group_scales is None:
        return scales
    assert weight.offset is not None
    table = paddle.to_tensor(dynamic_levels(), place=scales.place)
    groups = paddle.gather(weight.group_scales, paddle.arange(first, last) // weight.group_size)
    return paddle.gather(table, scales.astype("int32")) * groups + weight.offset


def dequantize_rows_reference(
    weight: QuantizedWeight, first: int, last: int, dtype: paddle.dtype = paddle.float32
) -> paddle.Tensor:
    """Dequantize in plain Paddle, on any device; the result is float32 for every requested dtype."""
    begin, end, first_block, last_block = _extent(weight, first, last)
    scales_B1 = block_scales(weight, first_block, last_block).unsqueeze(1)
    if weight.algo == "weight_only_int8":
        values = weight.codes[begin:end].astype("float32")
    else:
        packed = weight.codes[begin // 2 : -(-end // 2)].astype("int32")
        table = paddle.to_tensor(levels(weight.algo), place=packed.place)
        both = paddle.stack([packed // 16, packed % 16], axis=1).flatten()
        values = paddle.gather(table, both)[: end - begin]
    missing = (last_block - first_block) * weight.block_size - (end - begin)
    if missing:
        values = paddle.concat([values, paddle.zeros([missing])])
    return (values.reshape([-1, weight.block_size]) * scales_B1).flatten()[: end - begin].reshape([last - first, -1])


def dequantize_rows_gpu(
    weight: QuantizedWeight, first: int, last: int, dtype: paddle.dtype = paddle.float32
) -> paddle.Tensor:
    """Dequantize with the Triton kernel, or in plain Paddle if the codes of a byte may have different scales."""
    backend = dequantize_rows_reference if weight.block_size % 2 else dequantize_rows_triton
    return backend(weight, first, last, dtype)


def dequantize_rows_numpy(
    weight: QuantizedWeight, first: int, last: int, dtype: paddle.dtype = paddle.float32
) -> paddle.Tensor:
    """Dequantize in NumPy on the CPU, in float32; each byte is looked up as a pair of weights."""
    begin, end, first_block, last_block = _extent(weight, first, last)
    scales_B = _block_scales_numpy(weight, first_block, last_block)
    if weight.algo == "weight_only_int8":
        values = weight.codes[begin:end].numpy().astype(np.float32)
    else:
        values = _pairs(weight.algo)[weight.codes[begin // 2 : -(-end // 2)].numpy()].view(np.float32)[: end - begin]
    num_full = (end - begin) // weight.block_size
    blocks = values[: num_full * weight.block_size].reshape(num_full, weight.block_size)
    blocks *= scales_B[:num_full, None]
    values[num_full * weight.block_size :] *= scales_B[num_full:].sum()  # of a shorter last block; empty without one
    return paddle.to_tensor(values.reshape(last - first, -1), place=paddle.CPUPlace())


def _block_scales_numpy(weight: QuantizedWeight, first: int, last: int) -> np.ndarray:
    scales = weight.scales[first:last].numpy()
    if weight.group_scales is None:
        return scales
    assert weight.offset is not None
    groups = weight.group_scales.numpy()[np.arange(first, last) // weight.group_size]
    return dynamic_levels()[scales] * groups + weight.offset.numpy()


def _extent(weight: QuantizedWeight, first: int, last: int) -> tuple[int, int, int, int]:
    """Return the first and end index of the rows' weights, and of their blocks."""
    begin, end = first * weight.shape[1], last * weight.shape[1]
    assert begin % weight.block_size == 0 and begin % 2 == 0, (
        "rows must begin at the start of a block and of a byte (see row_blocks)"
    )
    return begin, end, begin // weight.block_size, -(-end // weight.block_size)


def _pairs(algo: str) -> np.ndarray:
    """Return the two weights of each byte, stored as one 8-byte number, [256]."""
    table = levels(algo)
    pairs = np.stack([np.repeat(table, 16), np.tile(table, 16)], axis=1)
    return np.ascontiguousarray(pairs).view(np.float64)[:, 0]


dequantize_op = DispatchedOp(
    "dequantize",
    triton=(dequantize_rows_gpu, on_gpu_in_4_bits),
    native=(dequantize_rows_cpp, usable_on_codes),
    cpu=(dequantize_rows_numpy, on_cpu),
    reference=dequantize_rows_reference,
)
"""Backends take (weight, first, last, dtype) and may return float32 if they support no other dtype."""
