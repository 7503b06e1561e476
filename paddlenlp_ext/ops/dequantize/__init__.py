"""Dequantize quantized weights, in full or in chunks of rows.

    w[i] = level(code[i]) scale[i // block]        over the flattened weight, row by row
    w[i] = (level(code[i]) - zero[i // block]) scale[i // block]        integer formats with zero points
    scale[j] = dynamic(code8[j]) scale8[j // group] + offset        with double quantization

The format is from QLoRA (Dettmers et al. 2023, arXiv:2305.14314). The backends on the CPU return the same bits.

Shapes: N = out * in weights; B = ceil(N / block) scales; G = ceil(B / group).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import paddle

from paddlenlp_ext.ops.dequantize.cpp import dequantize_rows_cpp, usable_on_codes
from paddlenlp_ext.ops.dequantize.plain_cpu import dequantize_rows_plain_cpu
from paddlenlp_ext.ops.dequantize.reference import dequantize_rows_reference
from paddlenlp_ext.ops.dequantize.triton import dequantize_rows_triton
from paddlenlp_ext.ops.dispatch import DispatchedOp, on_cpu
from paddlenlp_ext.ops.quantized_weight import QuantizedStack, QuantizedWeight
from paddlenlp_ext.ops.quantized_weight.triton import on_gpu_in_4_bits
from paddlenlp_ext.paddle_compat import is_symbolic

_CHUNK = 1 << 20
"""Number of weights dequantized at a time on the CPU: 4 MB in float32."""

_CHUNK_DEVICE = 1 << 26
"""Number of weights dequantized at a time on other devices, where small matmuls are slow: 128 MB in half precision."""


def row_blocks(weight: QuantizedWeight, limit: int | None = None) -> Iterator[tuple[int, int]]:
    """Split the rows into chunks (first row, end row) that start at a block boundary and a byte boundary.

    A chunk has about `limit` weights, or more if needed to reach a boundary. By default, the limit depends on the
    device. In a static graph, the default is one chunk with all weights.
    """
    if limit is None and is_symbolic(weight.codes):
        limit = weight.num_weights
    limit = limit or (_CHUNK if weight.codes.place.is_cpu_place() else _CHUNK_DEVICE)
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
    """Return the dequantized rows `first` to `last` - 1, a chunk of `row_blocks`, [last - first, in]."""
    rows = dequantize_op.choose(weight.codes)(weight, first, last, dtype if weight.is_plain else paddle.float32)
    if weight.zeros is not None:
        shifts_RG = weight.block_shifts()[first:last]
        rows = rows + paddle.repeat_interleave(shifts_RG, weight.block_size, axis=1)
    if weight.order is not None:
        rows = paddle.index_select(rows, weight.order.argsort(), axis=1)
    return rows if rows.dtype == dtype else rows.astype(dtype)


dequantize_op = DispatchedOp(
    "dequantize",
    triton=(dequantize_rows_triton, on_gpu_in_4_bits),
    cpp=(dequantize_rows_cpp, usable_on_codes),
    plain_cpu=(dequantize_rows_plain_cpu, on_cpu),
    reference=dequantize_rows_reference,
)
"""Op that dequantizes rows. Arguments of a backend: (weight, first, last, dtype). A backend may return float32 for any
`dtype`."""
