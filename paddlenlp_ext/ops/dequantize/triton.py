"""Launch the Triton kernel that dequantizes 4-bit weights on Paddle tensors.

Tested in Triton's interpreter on the CPU (tests/ops/quantized_linear/test_triton.py), except for `launch`.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.dequantize.reference import dequantize_rows_reference, extent
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.ops.quantized_weight.triton import kernel_format, kernel_tables
from paddlenlp_ext.ops.triton_utils.launch import launch


def dequantize_rows_triton(
    weight: QuantizedWeight, first: int, last: int, dtype: paddle.dtype = paddle.float32
) -> paddle.Tensor:
    """Dequantize rows `first` to `last` - 1 of a 4-bit weight; row `first` must start at a block and byte boundary.

    The reference is used for odd block sizes, because the two codes of a byte may then have different scales.
    """
    if weight.block_size % 2:
        return dequantize_rows_reference(weight, first, last, dtype)
    from paddlenlp_ext.ops.dequantize.kernels import DEQUANTIZE_SIZES, dequantize_kernel

    begin, end, first_block, _ = extent(weight, first, last)
    count = end - begin
    out = paddle.empty([last - first, weight.shape[1]], dtype, device=weight.codes.place)
    arguments = (weight.codes[begin // 2 :], *kernel_tables(weight, first_block), out)
    sizes, numbers = DEQUANTIZE_SIZES(out), (count, -(-count // 2), first_block)
    grid = (-(-count // (2 * sizes["BYTES"])),)
    launch(dequantize_kernel, grid, *arguments, *numbers, **sizes, **kernel_format(weight))
    return out
