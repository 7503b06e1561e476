"""Launch the Triton kernel that dequantizes 4-bit weights on Paddle tensors.

Tested in Triton's interpreter on the CPU (tests/ops/quantized_linear/test_triton.py), except for `launch`.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.dequantize.reference import dequantize_rows_reference
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.ops.quantized_weight.triton import kernel_format, kernel_tables
from paddlenlp_ext.ops.triton_utils.launch import launch


def dequantize_rows_triton(
    weight: QuantizedWeight, first: int, last: int, dtype: paddle.dtype = paddle.float32
) -> paddle.Tensor:
    """Dequantize rows of a 4-bit weight to [last - first, I]; they must start at a block and a byte boundary.

    For odd block sizes, where the two codes of a byte may have different scales, the reference is used.
    """
    if weight.block_size % 2:
        return dequantize_rows_reference(weight, first, last, dtype)
    from paddlenlp_ext.ops.dequantize.kernels import DEQUANTIZE_SIZES, dequantize_kernel

    width, block = weight.shape[1], weight.block_size
    begin, count = first * width, (last - first) * width
    assert begin % block == 0 and begin % 2 == 0, (
        "rows must start at a block boundary and a byte boundary (see row_blocks)"
    )
    out = paddle.empty([last - first, width], dtype, device=weight.codes.place)
    arguments = (weight.codes[begin // 2 :], *kernel_tables(weight, begin // block), out)
    sizes, numbers = DEQUANTIZE_SIZES(out), (count, -(-count // 2), begin // block)
    grid = (-(-count // (2 * sizes["BYTES"])),)
    launch(dequantize_kernel, grid, *arguments, *numbers, **sizes, **kernel_format(weight))
    return out
