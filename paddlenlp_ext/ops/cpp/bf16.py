"""bfloat16 on the CPU, used for stored weights and for rounded matmul inputs; everything else is float32."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import paddle

from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.tensor_utils import contiguous

if TYPE_CHECKING:
    from paddlenlp_ext.ops.quantized_weight import QuantizedWeight

_bf16_matmuls = False


def bf16_matmuls() -> AbstractContextManager[None]:
    """Round the inputs of all C++ matmuls to bfloat16 within this context, even for float32 weights."""
    return _set_bf16_matmuls(True)


def capture_precision(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `run` to use the current matmul precision when it recomputes a forward pass later."""
    captured = _bf16_matmuls

    def run_again(*args: Any) -> Any:
        with _set_bf16_matmuls(captured):
            return run(*args)

    return run_again


@contextmanager
def _set_bf16_matmuls(value: bool) -> Iterator[None]:
    global _bf16_matmuls
    before, _bf16_matmuls = _bf16_matmuls, value
    try:
        yield
    finally:
        _bf16_matmuls = before


def bf16_matmuls_enabled() -> bool:
    """Return whether a `bf16_matmuls` context is active."""
    return _bf16_matmuls


def uses_bf16(weight: paddle.Tensor | QuantizedWeight) -> bool:
    """Return whether a matmul with this weight rounds its inputs to bfloat16."""
    return _bf16_matmuls or (weight.dtype == paddle.bfloat16 and unavailable_reason() is None)


def activation_dtype(dtype: paddle.dtype | str) -> paddle.dtype | str:
    """Return the dtype of activations, norms, biases and adapters for weights of `dtype`.

    It is `dtype` itself, except for bfloat16 on the CPU, where Paddle's kernels require float32.
    """
    is_half = dtype in ("bfloat16", paddle.bfloat16)
    return paddle.float32 if is_half and paddle.get_device() == "cpu" else dtype


def unavailable_reason() -> str | None:
    """Return why bfloat16 matmuls are unavailable on this CPU, or None if they are available."""
    if library.unavailable_reason() is not None:
        return library.unavailable_reason()
    if not _has_bf16_products():
        return "this processor does not have AVX-512, which oneDNN needs for bfloat16 matmuls"
    return None


@functools.cache
def _has_bf16_products() -> bool:
    result = ctypes.c_int64()
    library.function("has_bf16_products")(ctypes.byref(result))
    return bool(result.value)


def matmul_operand(parameter: paddle.Tensor) -> paddle.Tensor:
    """Return a contiguous parameter in a dtype that the matmuls can read.

    A bfloat16 matrix stays bfloat16 if the processor supports such matmuls; everything else is cast to float32.
    """
    if parameter.dtype == paddle.float32:
        return contiguous(parameter)
    is_matrix = parameter.dtype == paddle.bfloat16 and parameter.ndim == 2
    if is_matrix and unavailable_reason() is None:
        return contiguous(parameter)
    return contiguous(parameter.astype("float32"))


def as_bf16(x: paddle.Tensor) -> paddle.Tensor:
    """Return `x` in bfloat16; a bfloat16 `x` is returned unchanged."""
    if x.dtype == paddle.bfloat16:
        return x
    bf16_copy = library.empty(x.shape, "bfloat16")
    library.function("convert_to_bf16")(library.pointer(x), library.pointer(bf16_copy), x.size)
    return bf16_copy


def cached_bf16(x: paddle.Tensor) -> paddle.Tensor:
    """Return `x` in bfloat16, converted once for all layers that read x (q, k and v; gate and up).

    The copy lives as long as x. Parameters are converted every time, because setting their values does not change
    `inplace_version`.
    """
    if x.persistable:
        return as_bf16(x)
    cached = getattr(x, "_bf16_copy", None)
    if cached is None or cached[0] != x.inplace_version:
        cached = x._bf16_copy = (x.inplace_version, as_bf16(x))
    return cached[1]
