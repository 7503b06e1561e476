"""Kernel arguments of quantized weights for Triton.

Shapes: O outputs and I inputs of the weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paddle

from paddlenlp_ext.devices import capabilities
from paddlenlp_ext.ops.dispatch import NotApplicable
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.ops.quantized_weight.codebooks import dynamic_levels, levels
from paddlenlp_ext.ops.triton_utils.launch import on_gpu_with_triton

if TYPE_CHECKING:
    from paddlenlp_ext.ops.triton_utils.weight_tiles import Format, Layer


def on_gpu_in_4_bits(x: paddle.Tensor) -> str | None:
    """Return None for 4-bit codes on a GPU with Triton, otherwise the reason why Triton kernels cannot run."""
    if capabilities(x.place).triton and x.dtype == paddle.int8:
        return NotApplicable("the backend supports only 4-bit weights")
    return on_gpu_with_triton(x)


def fits_tiles(weight: QuantizedWeight) -> bool:
    """Return whether kernels can read a weight in tiles.

    The weight must be plain, and a row must consist of whole bytes. A block must be a full row, or a power of two that
    divides the row length.
    """
    block, inputs = weight.block_size, weight.shape[1]
    is_power = block >= 2 and block & (block - 1) == 0
    return weight.is_plain and inputs % 2 == 0 and (block == inputs or (is_power and inputs % block == 0))


def tile_layer(weight: QuantizedWeight, y: paddle.Tensor, bias: paddle.Tensor | None = None) -> Layer:
    """Return the tensors of a linear layer for kernels that read the weight in tiles and write y [..., O]."""
    from paddlenlp_ext.ops.triton_utils.weight_tiles import Layer

    return Layer(weight.codes, y, bias, weight.scales, weight.group_scales, weight.offset)


def tile_format(weight: QuantizedWeight) -> Format:
    """Return the weight format for kernels that read the weight in tiles."""
    from paddlenlp_ext.ops.triton_utils.weight_tiles import Format

    of_scales = None if weight.group_scales is None else _cached_table(weight, "scale levels", dynamic_levels())
    if weight.algo == "weight_only_int8":
        return Format(8, weight.block_size, weight.group_size, None, of_scales)
    of_codes = _cached_table(weight, "levels", levels(weight.algo))
    return Format(4, weight.block_size, weight.group_size, of_codes, of_scales)


def kernel_format(weight: QuantizedWeight) -> dict[str, Any]:
    """Return the compile-time constants that describe the format of a 4-bit weight."""
    nested = weight.group_scales is not None
    return {"BLOCK": weight.block_size, "GROUP": max(1, weight.group_size), "NESTED": nested}


def kernel_tables(weight: QuantizedWeight, first_scale: int) -> tuple[paddle.Tensor, ...]:
    """Return levels, scales, scale levels, group scales and offset, in the order of the kernel parameters."""
    table = _cached_table(weight, "levels", levels(weight.algo))
    scales = weight.scales[first_scale:]
    if weight.group_scales is None:
        return table, scales, table, table, table  # kernels read the last three only with quantized scales
    assert weight.offset is not None
    return table, scales, _cached_table(weight, "scale levels", dynamic_levels()), weight.group_scales, weight.offset


def _cached_table(weight: QuantizedWeight, name: str, numbers: Any) -> paddle.Tensor:
    if name not in weight.kernel_cache:
        weight.kernel_cache[name] = paddle.to_tensor(numbers, place=weight.codes.place)
    return weight.kernel_cache[name]
