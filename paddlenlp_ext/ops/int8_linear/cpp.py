"""Linear layer in 8-bit integers in C++ (csrc/int8_linear.cpp)."""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass

import paddle

from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.cpp.bf16 import matmul_operand
from paddlenlp_ext.ops.int8_linear.reference import BLOCK
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.ops.quantized_weight.cpp import packed
from paddlenlp_ext.ops.tensor_utils import contiguous


def unavailable_reason() -> str | None:
    """Return the reason why 8-bit matmuls are not the fastest on this processor, or None if they are."""
    if library.unavailable_reason() is not None:
        return library.unavailable_reason()
    if not _has_int8_products():
        return (
            "this processor has no instructions for 8-bit matmuls (AMX, AVX-512-VNNI or AVX-VNNI), or Linux does not "
            "permit AMX in this process"
        )
    return None


@functools.cache
def _has_int8_products() -> bool:
    result = ctypes.c_int64()
    library.function("has_int8_products")(ctypes.byref(result))
    return bool(result.value)


@dataclass(frozen=True)
class _Int8Rows:
    """Rows rounded to int8, in the format of `int8_round_rows` in csrc/api_linear.h."""

    values: paddle.Tensor
    scales: paddle.Tensor
    offsets: paddle.Tensor


def int8_linear_cpp(x: paddle.Tensor, weight: QuantizedWeight, bias: paddle.Tensor | None = None) -> paddle.Tensor:
    """Return q(x) q(W)^T + bias, float32 [..., out], without autograd.

    Raises:
        ValueError: the shapes do not match.
    """
    _check(weight, "x", x.shape, 1)
    x = contiguous(x)
    y = library.empty([*x.shape[:-1], weight.shape[0]])
    rows, own_bias = _cached_rows(x), None if bias is None else matmul_operand(bias)
    addresses = [library.pointer(each) for each in (rows.values, rows.scales, rows.offsets)]
    library.function("int8_linear_forward")(
        *addresses,
        packed(weight),
        None if own_bias is None else library.pointer(own_bias),
        library.pointer(y),
        math.prod(x.shape[:-1]),
    )
    return y


def int8_input_gradient_cpp(gradient: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Return the input gradient, float32 [..., in], for a float32 or bfloat16 dL/dy [..., out].

    Raises:
        ValueError: the shapes do not match.
    """
    _check(weight, "gradient", gradient.shape, 0)
    gradient = contiguous(gradient)
    x_gradient = library.empty([*gradient.shape[:-1], weight.shape[1]])
    library.function("int8_linear_input_gradient")(
        library.pointer(gradient),
        packed(weight),
        library.pointer(x_gradient),
        math.prod(gradient.shape[:-1]),
        gradient.dtype == paddle.bfloat16,
    )
    return x_gradient


def _check(weight: QuantizedWeight, name: str, shape: list[int], axis: int) -> None:
    assert weight.is_plain, "8-bit products support neither zero points nor reordered columns"
    if shape[-1] != weight.shape[axis]:
        raise ValueError(
            f"int8_linear: shapes do not match: {name} {list(shape)} with a weight of shape {list(weight.shape)}"
        )


def _cached_rows(x: paddle.Tensor) -> _Int8Rows:
    """Round the rows of a contiguous `x` to int8, once for all layers that read x (like `cached_bf16` in bf16.py)."""
    if x.persistable:
        return _rounded_rows(x)
    cached = getattr(x, "_int8_rows", None)
    if cached is None or cached[0] != x.inplace_version:
        cached = x._int8_rows = (x.inplace_version, _rounded_rows(x))
    return cached[1]


def _rounded_rows(x: paddle.Tensor) -> _Int8Rows:
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    values = library.empty([rows, -(-width // 4) * 4], "int8")
    blocks = -(-width // BLOCK)
    result = _Int8Rows(values, library.empty([rows, blocks]), library.empty([rows, blocks], "int32"))
    addresses = [library.pointer(each) for each in (result.values, result.scales, result.offsets)]
    library.function("int8_round_rows")(library.pointer(x), rows, width, *addresses, x.dtype == paddle.bfloat16)
    return result
