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
    from paddlenlp_ext.ops.quantized.weight import QuantizedWeight


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
    arguments = (weight.codes[begin // 2 :], *tables(weight, begin // block), out)
    sizes, numbers = DEQUANTIZE_SIZES(), (count, -(-count // 2), begin // block)
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
    arguments = (x_TI.contiguous(), weight.codes, *tables(weight, 0), y_TO, outputs, inputs)
    sizes = PRODUCT_SIZES()
    sizes["BLOCKS"] = sizes.pop("INPUTS") // weight.block_size
    grid = -(-outputs // sizes["OUTPUTS"]), positions
    launch(product_kernel, grid, *arguments, **sizes, **_format(weight))
    return y_TO


def _format(weight: QuantizedWeight) -> dict[str, Any]:
    nested = weight.group_scales is not None
    return {"BLOCK": weight.block_size, "GROUP": max(1, weight.group_size), "NESTED": nested}


def tables(weight: QuantizedWeight, first_scale: int) -> tuple[paddle.Tensor, ...]:
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
