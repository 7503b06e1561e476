"""Dequantize rows in plain Paddle, on any device."""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.ops.quantized_weight.codebooks import dynamic_levels, levels


def dequantize_rows_reference(
    weight: QuantizedWeight, first: int, last: int, dtype: paddle.dtype = paddle.float32
) -> paddle.Tensor:
    """Dequantize rows `first` to `last` - 1 in plain Paddle; the result is float32 for any requested dtype."""
    begin, end, first_block, last_block = extent(weight, first, last)
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


def block_scales(weight: QuantizedWeight, first: int, last: int) -> paddle.Tensor:
    """Return the float32 scales `first` to `last` - 1."""
    scales = weight.scales[first:last]
    if weight.group_scales is None:
        return scales
    assert weight.offset is not None
    table = paddle.to_tensor(dynamic_levels(), place=scales.place)
    groups = paddle.gather(weight.group_scales, paddle.arange(first, last) // weight.group_size)
    return paddle.gather(table, scales.astype("int32")) * groups + weight.offset


def extent(weight: QuantizedWeight, first: int, last: int) -> tuple[int, int, int, int]:
    """Return the index range of the weights in rows `first` to `last` - 1, and the index range of their blocks."""
    begin, end = first * weight.shape[1], last * weight.shape[1]
    assert begin % weight.block_size == 0 and begin % 2 == 0, (
        "rows must start at a block boundary and a byte boundary (see row_blocks)"
    )
    return begin, end, begin // weight.block_size, -(-end // weight.block_size)
