"""Linear layer with a 4-bit weight on a GPU, with Triton kernels for inputs of few tokens.

Tested in Triton's interpreter on the CPU (tests/ops/quantized_linear/test_triton.py), except for `launch`.

Shapes: T positions, O outputs and I inputs of the weight.
"""

from __future__ import annotations

import math

import paddle

from paddlenlp_ext.ops.norm_linear.fits_one_launch import MOST_POSITIONS
from paddlenlp_ext.ops.quantized_linear.reference import quantized_linear_reference
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.ops.quantized_weight.triton import fits_tiles, kernel_format, kernel_tables, tile_format, tile_layer
from paddlenlp_ext.ops.tensor_utils import in_dtype, product_dtype
from paddlenlp_ext.ops.triton_utils.launch import launch

_MAX_FUSED_POSITIONS = 2
"""Largest number of positions for which `product_triton` is fastest (benchmarks/triton_dequantize.py)."""


def quantized_linear_triton(x: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Return x W^T [..., out]: from a fused kernel for few tokens, otherwise from Paddle's matmul."""
    x = in_dtype(x, product_dtype(x))  # autocast does not cast the inputs of Triton kernels
    (out, width), leading = weight.shape, x.shape[:-1]
    positions = math.prod(leading)
    if positions <= _MAX_FUSED_POSITIONS and supports_product(weight):
        product = product_triton
    elif 0 < positions <= MOST_POSITIONS and fits_tiles(weight):
        product = tile_product_triton
    else:
        return quantized_linear_reference(x, weight)
    return product(x.reshape([-1, width]), weight).reshape([*leading, out])


def supports_product(weight: QuantizedWeight) -> bool:
    """Return whether `product_triton` supports a weight.

    The weight must be plain, and a row must consist of whole blocks. The block size must be a power of two from 2 to
    LARGEST_BLOCK.
    """
    from paddlenlp_ext.ops.quantized_linear.kernels import LARGEST_BLOCK

    block = weight.block_size
    is_power = 2 <= block <= LARGEST_BLOCK and block & (block - 1) == 0
    return weight.is_plain and weight.shape[1] % block == 0 and is_power


def product_triton(x_TI: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Return x W^T [T, O] in the dtype of `x`; all codes are read for each position. Requires `supports_product`."""
    from paddlenlp_ext.ops.quantized_linear.kernels import PRODUCT_SIZES, product_kernel

    assert supports_product(weight), f"unsupported blocks of {weight.block_size} in {list(weight.shape)}"
    positions, (outputs, inputs) = x_TI.shape[0], weight.shape
    y_TO = paddle.empty([positions, outputs], x_TI.dtype, device=weight.codes.place)
    arguments = (x_TI.contiguous(), weight.codes, *kernel_tables(weight, 0), y_TO, outputs, inputs)
    sizes = PRODUCT_SIZES(y_TO)
    sizes["BLOCKS"] = sizes.pop("INPUTS") // weight.block_size
    grid = -(-outputs // sizes["OUTPUTS"]), positions
    launch(product_kernel, grid, *arguments, **sizes, **kernel_format(weight))
    return y_TO


def tile_product_triton(x_TI: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Return x W^T [T, O] in the dtype of `x`, for at most 16 positions; codes are read once. Requires `fits_tiles`."""
    from paddlenlp_ext.ops.norm_linear.kernels import launch_norm_linear

    assert fits_tiles(weight), f"unsupported blocks of {weight.block_size} in {list(weight.shape)}"
    y_TO = paddle.empty([x_TI.shape[0], weight.shape[0]], x_TI.dtype, device=weight.codes.place)
    launch_norm_linear(launch, x_TI.contiguous(), [tile_layer(weight, y_TO)], tile_format(weight))
    return y_TO
