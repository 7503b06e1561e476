"""Dequantize rows in C++ (csrc/dequantize.cpp)."""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.dispatch import on_cpu
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.ops.quantized_weight.cpp import packed


def usable_on_codes(codes: paddle.Tensor) -> str | None:
    """Return None for codes on the CPU if the library is available, otherwise the reason why C++ cannot run."""
    return on_cpu(codes) or library.unavailable_reason()


def dequantize_rows_cpp(
    weight: QuantizedWeight, first: int, last: int, dtype: paddle.dtype = paddle.float32
) -> paddle.Tensor:
    """Dequantize rows `first` to `last` - 1 to bfloat16 if requested, otherwise to float32."""
    out, width = weight.shape
    assert 0 <= first <= last <= out, f"rows {first} to {last} of {out}"
    in_bf16 = dtype == paddle.bfloat16
    rows = library.empty([last - first, width], "bfloat16" if in_bf16 else "float32")
    run = library.function("dequantize_weight")
    run(packed(weight), first, last, library.pointer(rows), in_bf16)
    return rows
