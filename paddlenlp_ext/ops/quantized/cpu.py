"""Quantized weights in C++: dequantization (csrc/dequantize.cpp) and matmuls (csrc/quantized_linear.cpp).

Shapes: in/out features of the weight. Of a stack: N rows, G groups, I inputs, O outputs, P matrices of a group.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import paddle

from paddlenlp_ext.ops.cpu import library
from paddlenlp_ext.ops.cpu.api import struct
from paddlenlp_ext.ops.cpu.bf16 import as_bf16, cached_bf16, uses_bf16
from paddlenlp_ext.ops.dispatch import on_cpu
from paddlenlp_ext.ops.grouped_linear import groups_with_rows
from paddlenlp_ext.ops.linear import SMALL_BATCH_ROWS, contiguous
from paddlenlp_ext.ops.quantized.codebooks import dynamic_levels, levels
from paddlenlp_ext.ops.quantized.zero_points import input_gradient_with_zero_points, linear_with_zero_points

if TYPE_CHECKING:
    from paddlenlp_ext.ops.quantized.weight import QuantizedStack, QuantizedWeight


def usable_on_codes(codes: paddle.Tensor) -> str | None:
    """Return None for codes on the CPU with the library available; otherwise the reason. A `dispatch.Condition`."""
    return on_cpu(codes) or library.unavailable_reason()


def dequantize_rows_cpp(
    weight: QuantizedWeight, first: int, last: int, dtype: paddle.dtype = paddle.float32
) -> paddle.Tensor:
    """Dequantize any rows to [last - first, in], in bfloat16 if requested and otherwise in float32."""
    out, width = weight.shape
    assert 0 <= first <= last <= out, f"rows {first} to {last} of {out}"
    in_bf16 = dtype == paddle.bfloat16
    rows = library.empty([last - first, width], "bfloat16" if in_bf16 else "float32")
    run = library.function("dequantize_weight")
    run(_packed(weight), first, last, library.pointer(rows), in_bf16)
    return rows


def quantized_linear_cpp(x: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Return x W^T [..., out] of float32 x [..., in], without autograd.

    Raises:
        ValueError: the last axis of x does not match the weight.
    """
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"quantized_linear: shapes do not match: x {list(x.shape)} with a weight of shape {list(weight.shape)}"
        )
    if not weight.is_plain:
        return linear_with_zero_points(quantized_linear_cpp, x, weight)
    x, rows = contiguous(x), math.prod(x.shape[:-1])
    y = library.empty([*x.shape[:-1], weight.shape[0]])
    if rows <= SMALL_BATCH_ROWS:
        run = library.function("quantized_linear_small_batch")
        run(library.pointer(x), _packed(weight), library.pointer(y), rows)
        return y
    operand = cached_bf16(x) if uses_bf16(weight) else x
    _call("quantized_linear_forward", operand, weight, y)
    return y


def quantized_input_gradient_cpp(gradient: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Return (dL/dy) W, float32 [..., in], of a float32 or bfloat16 dL/dy [..., out]."""
    if not weight.is_plain:
        return input_gradient_with_zero_points(quantized_input_gradient_cpp, gradient, weight)
    gradient = contiguous(gradient)
    operand = as_bf16(gradient) if uses_bf16(weight) else gradient
    x_gradient = library.empty([*gradient.shape[:-1], weight.shape[1]])
    _call("quantized_linear_input_gradient", operand, weight, x_gradient, False)
    return x_gradient


def quantized_grouped_linear_cpp(
    x_NI: paddle.Tensor, stack: QuantizedStack, starts: np.ndarray
) -> tuple[paddle.Tensor, ...]:
    """Return the P parts of x W[g]^T, each [N, O / P], of float32 rows sorted by group, without autograd."""
    x = contiguous(x_NI)
    is_small = int(np.diff(starts).max(initial=0)) <= SMALL_BATCH_ROWS
    operand = cached_bf16(x) if uses_bf16(stack.matrices) and not is_small else x
    results = tuple(library.empty([len(x), stack.matrices.shape[0]]) for _ in range(stack.parts))
    run = library.function("quantized_linear_small_batch" if is_small else "quantized_linear_forward")
    precision = () if is_small else (operand.dtype == paddle.bfloat16,)
    for group, first, end in groups_with_rows(starts):
        for part, y in enumerate(results):
            weight = _packed(stack.matrices, group * stack.parts + part)
            run(_row(operand, first), weight, _row(y, first), end - first, *precision)
    return results


def quantized_grouped_input_gradient_cpp(
    gradients: Sequence[paddle.Tensor], stack: QuantizedStack, starts: np.ndarray
) -> paddle.Tensor:
    """Return the gradient of x, float32 [N, I], of those of the P parts, each [N, O / P]."""
    in_bf16 = uses_bf16(stack.matrices)
    operands = [as_bf16(contiguous(each)) if in_bf16 else contiguous(each) for each in gradients]
    x_gradient = library.empty([len(operands[0]), stack.matrices.shape[1]])
    run = library.function("quantized_linear_input_gradient")
    for group, first, end in groups_with_rows(starts):
        for part, gradient in enumerate(operands):
            weight = _packed(stack.matrices, group * stack.parts + part)
            is_bf16 = gradient.dtype == paddle.bfloat16
            run(_row(gradient, first), weight, _row(x_gradient, first), end - first, part > 0, is_bf16)
    return x_gradient


def _row(x: paddle.Tensor, row: int) -> int:
    """Return the address of a row of a contiguous matrix."""
    return library.pointer(x) + row * x.shape[1] * x.element_size()


def _call(name: str, operand: paddle.Tensor, weight: QuantizedWeight, out: paddle.Tensor, *flags: bool) -> None:
    run = library.function(name)
    in_bf16, rows = operand.dtype == paddle.bfloat16, math.prod(operand.shape[:-1])
    run(library.pointer(operand), _packed(weight), library.pointer(out), rows, *flags, in_bf16)


def _packed(weight: QuantizedWeight, index: int = 0) -> object:
    """Return a pointer to the QuantizedWeight struct of matrix `index` of a stack, valid for the duration of a call."""
    return ctypes.byref(packed_struct(weight, index))


def packed_struct(weight: QuantizedWeight, index: int = 0) -> ctypes.Structure:
    """Return the QuantizedWeight struct of matrix `index` of a stack, valid as long as the weight's tensors."""
    out, width = weight.shape
    table = None if weight.algo == "weight_only_int8" else _address(weight.algo)
    nested = (None, None, None)
    if weight.group_scales is not None:
        assert weight.offset is not None
        nested = (_address(""), _own(weight.group_scales, index), _own(weight.offset, index))
    sizes = out, width, weight.block_size, weight.group_size
    codes, scales = _own(weight.codes, index), _own(weight.scales, index)
    return struct("QuantizedWeight")(*sizes, codes, table, scales, *nested)


def _own(stacked: paddle.Tensor, index: int) -> int:
    """Return the address of a matrix's own values: row `index` of all but the last axis."""
    return library.pointer(stacked) + index * stacked.shape[-1] * stacked.element_size()


@functools.cache
def _address(algo: str) -> int:
    """Return the address of the levels of a 4-bit format, or of a scale's levels for ""; the tables are never freed."""
    table = levels(algo) if algo else dynamic_levels()
    assert table.flags.c_contiguous and table.dtype == np.float32
    return table.ctypes.data
