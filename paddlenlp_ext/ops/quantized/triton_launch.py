"""Launch the 4-bit Triton kernels on Paddle tensors.

tests/ops/quantized/test_triton_kernels.py runs everything except `launch` in Triton's interpreter, on the CPU.

Shapes: T positions, O outputs and I inputs of the weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paddle

from paddlenlp_ext.ops.dispatch import NotApplicable
from paddlenlp_ext.ops.quantized.codebooks import dynamic_levels, levels
from paddlenlp_ext.ops.triton_launch import launch, on_gpu_with_triton

if TYPE_CHECKING:
    from paddlenlp_ext.ops.quantized.triton_tiles import Format, Layer
    from paddlenlp_ext.ops.quantized.weight import QuantizedWeight

MOST_POSITIONS = 16
"""Positions up to which tiles of ops/norm_linear are multiplied: the columns of a tile."""


def on_gpu_in_4_bits(x: paddle.Tensor) -> str | None:
    """Return None for 4-bit codes on a GPU with Triton installed; otherwise the reason. A `dispatch.Condition`."""
    if x.place.is_gpu_place() and x.dtype == paddle.int8:
        return NotApplicable("it is for weights in 4 bits")
    return on_gpu_with_triton(x)


def dequantize_rows_triton(
    weight: QuantizedWeight, first: int, last: int, dtype: paddle.dtype = paddle.float32
) -> paddle.Tensor:
    """Dequantize rows of a 4-bit weight to [last - first, I]; they must begin at a block and a byte."""
    from paddlenlp_ext.ops.quantized.triton_kernels import DEQUANTIZE_SIZES, dequantize_kernel

    width, block = weight.shape[1], weight.block_size
    begin, count = first * width, (last - first) * width
    assert begin % block == 0 and begin % 2 == 0, (
        "rows must begin at the start of a block and of a byte (see row_blocks)"
    )
    out = paddle.empty([last - first, width], dtype, device=weight.codes.place)
    arguments = (weight.codes[begin // 2 :], *_tables(weight, begin // block), out)
    sizes, numbers = DEQUANTIZE_SIZES(out), (count, -(-count // 2), begin // block)
    grid = (-(-count // (2 * sizes["BYTES"])),)
    launch(dequantize_kernel, grid, *arguments, *numbers, **sizes, **_format(weight))
    return out


def supports_product(weight: QuantizedWeight) -> bool:
    """Return whether `product_triton` supports this weight: rows of full blocks, and blocks that fit a program."""
    from paddlenlp_ext.ops.quantized.triton_kernels import LARGEST_BLOCK

    block = weight.block_size
    is_power = 2 <= block <= LARGEST_BLOCK and block & (block - 1) == 0
    return weight.is_plain and weight.shape[1] % block == 0 and is_power


def product_triton(x_TI: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Return x W^T [T, O] in the dtype of `x`; requires `supports_product`. Each position reads all codes."""
    from paddlenlp_ext.ops.quantized.triton_kernels import PRODUCT_SIZES, product_kernel

    assert supports_product(weight), f"no kernel for blocks of {weight.block_size} in {list(weight.shape)}"
    positions, (outputs, inputs) = x_TI.shape[0], weight.shape
    y_TO = paddle.empty([positions, outputs], x_TI.dtype, device=weight.codes.place)
    arguments = (x_TI.contiguous(), weight.codes, *_tables(weight, 0), y_TO, outputs, inputs)
    sizes = PRODUCT_SIZES(y_TO)
    sizes["BLOCKS"] = sizes.pop("INPUTS") // weight.block_size
    grid = -(-outputs // sizes["OUTPUTS"]), positions
    launch(product_kernel, grid, *arguments, **sizes, **_format(weight))
    return y_TO


def fits_tiles(weight: QuantizedWeight) -> bool:
    """Return whether triton_tiles.py can read this weight: rows of whole bytes and of equal blocks."""
    block, inputs = weight.block_size, weight.shape[1]
    is_power = block >= 2 and block & (block - 1) == 0
    return weight.is_plain and inputs % 2 == 0 and (block == inputs or (is_power and inputs % block == 0))


def tile_product_triton(x_TI: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Return x W^T [T, O] in the dtype of `x`, for at most 16 positions; requires `fits_tiles`. Codes are read once."""
    from paddlenlp_ext.ops.norm_linear.triton_kernels import launch_norm_linear

    assert fits_tiles(weight), f"no tiles for blocks of {weight.block_size} in {list(weight.shape)}"
    y_TO = paddle.empty([x_TI.shape[0], weight.shape[0]], x_TI.dtype, device=weight.codes.place)
    launch_norm_linear(launch, x_TI.contiguous(), [tile_layer(weight, y_TO)], tile_format(weight))
    return y_TO


def tile_layer(weight: QuantizedWeight, y: paddle.Tensor, bias: paddle.Tensor | None = None) -> Layer:
    """Return a linear layer as kernels over tiles take it; y [..., O] is written."""
    from paddlenlp_ext.ops.quantized.triton_tiles import Layer

    return Layer(weight.codes, y, bias, weight.scales, weight.group_scales, weight.offset)


def tile_format(weight: QuantizedWeight) -> Format:
    """Return the format of a weight as kernels over tiles take it."""
    from paddlenlp_ext.ops.quantized.triton_tiles import Format

    of_scales = None if weight.group_scales is None else _cached_table(weight, "scale levels", dynamic_levels())
    if weight.algo == "weight_only_int8":
        return Format(8, weight.block_size, weight.group_size, None, of_scales)
    of_codes = _cached_table(weight, "levels", levels(weight.algo))
    return Format(4, weight.block_size, weight.group_size, of_codes, of_scales)


def _format(weight: QuantizedWeight) -> dict[str, Any]:
    nested = weight.group_scales is not None
    return {"BLOCK": weight.block_size, "GROUP": max(1, weight.group_size), "NESTED": nested}


def _tables(weight: QuantizedWeight, first_scale: int) -> tuple[paddle.Tensor, ...]:
    """Return levels, scales, scale levels, group scales and offset, in the order of the kernels' parameters."""
    table = _cached_table(weight, "levels", levels(weight.algo))
    scales = weight.scales[first_scale:]
    if weight.group_scales is None:
        return table, scales, table, table, table  # the last three are not read
    assert weight.offset is not None
    return table, scales, _cached_table(weight, "scale levels", dynamic_levels()), weight.group_scales, weight.offset


def _cached_table(weight: QuantizedWeight, name: str, numbers: Any) -> paddle.Tensor:
    if name not in weight.kernel_cache:
        weight.kernel_cache[name] = paddle.to_tensor(numbers, place=weight.codes.place)
    return weight.kernel_cache[name]
