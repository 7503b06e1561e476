"""bfloat16 on the CPU, for stored weights and rounded matmul inputs; all other tensors are float32."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import paddle

from paddlenlp_ext.devices import capabilities
from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.tensor_utils import contiguous

if TYPE_CHECKING:
    from paddlenlp_ext.ops.quantized_weight import QuantizedWeight

_bf16_matmuls = False


def bf16_matmuls() -> AbstractContextManager[None]:
    """Return a context in which C++ matmuls round their inputs to bfloat16, even with float32 weights.

    With at most `library.small_batch_rows` rows, the forward pass of linear layers still reads float32 inputs.
    """
    return _set_bf16_matmuls(True)


def capture_precision(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `run`, which later recomputes a forward pass, with the matmul precision at the time of this call."""
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
    """Return whether a C++ matmul with this weight rounds its inputs to bfloat16."""
    return _bf16_matmuls or (weight.dtype == paddle.bfloat16 and unavailable_reason() is None)


def activation_dtype(dtype: paddle.dtype | str) -> paddle.dtype:
    """Return the dtype of activations, norms, biases and adapters for weights of `dtype`.

    The result is `dtype`, except that bfloat16 on the CPU gives float32, which Paddle's CPU kernels require.
    """
    dtype = getattr(paddle, dtype) if isinstance(dtype, str) else dtype
    return paddle.float32 if dtype == paddle.bfloat16 and capabilities(paddle.get_device()).cpp else dtype


def unavailable_reason() -> str | None:
    """Return the reason why bfloat16 matmuls are unavailable on this CPU, or None if they are available."""
    return library.products_unavailable_reason()


def conversion_reason() -> str | None:
    """Return the reason why bfloat16 matmuls convert their inputs to float32 and run at the speed of float32.

    The result is None if the processor multiplies bfloat16, or if bfloat16 matmuls are unavailable.
    """
    if unavailable_reason() is not None or _has_bf16_products():
        return None
    return "this processor does not have AVX-512, which oneDNN needs for bfloat16 matmuls"


@functools.cache
def _has_bf16_products() -> bool:
    result = ctypes.c_int64()
    library.function("has_bf16_products")(ctypes.byref(result))
    return bool(result.value)


def matmul_operand(parameter: paddle.Tensor) -> paddle.Tensor:
    """Return a contiguous parameter in a dtype that the C++ matmuls can read.

    A bfloat16 matrix stays bfloat16 if bfloat16 matmuls are available. Other parameters are cast to float32.
    """
    if parameter.dtype == paddle.float32:
        return contiguous(parameter)
    is_matrix = parameter.dtype == paddle.bfloat16 and parameter.ndim == 2
    if is_matrix and unavailable_reason() is None:
        return contiguous(parameter)
    return contiguous(parameter.astype("float32"))


def as_bf16(x: paddle.Tensor) -> paddle.Tensor:
    """Round `x` to bfloat16; return a bfloat16 `x` unchanged."""
    if x.dtype == paddle.bfloat16:
        return x
    bf16_copy = library.empty(x.shape, "bfloat16")
    library.function("convert_to_bf16")(library.pointer(x), library.pointer(bf16_copy), x.size)
    return bf16_copy


def cached_bf16(x: paddle.Tensor) -> paddle.Tensor:
    """Round `x` to bfloat16, once for all layers that read x (q, k and v; gate and up).

    The copy is cached on x. Parameters are rounded in every call, because setting the value of a parameter does not
    change `inplace_version`.
    """
    if x.persistable:
        return as_bf16(x)
    cached = getattr(x, "_bf16_copy", None)
    if cached is None or cached[0] != x.inplace_version:
        set_cached_bf16(x, as_bf16(x))
        return x._bf16_copy[1]
    return cached[1]


def set_cached_bf16(x: paddle.Tensor, copy: paddle.Tensor) -> None:
    """Set the result of `cached_bf16(x)`, for an op that rounds its output in the pass that computes it."""
    x._bf16_copy = (x.inplace_version, copy)
