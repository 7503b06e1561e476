"""bfloat16 on the CPU: weights are stored in it and products round their inputs to it; everything else is float32."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import paddle

from paddlenlp_ext.ops.cpu import library

_products = False


def bf16_matmuls() -> AbstractContextManager[None]:
    """A forward pass whose native products round their inputs to bfloat16, those of float32 weights too."""
    return _products_set(True)


def capture_precision(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, which whenever it is called computes in the products of this moment: for a forward pass made again."""
    now = _products

    def run_again(*args: Any) -> Any:
        with _products_set(now):
            return run(*args)

    return run_again


@contextmanager
def _products_set(value: bool) -> Iterator[None]:
    global _products
    before, _products = _products, value
    try:
        yield
    finally:
        _products = before


def products_are_half() -> bool:
    """Whether the forward pass is one of `bf16_matmuls`."""
    return _products


def halves(weight: paddle.Tensor) -> bool:
    """Whether a product with this weight rounds its inputs to bfloat16."""
    return _products or (weight.dtype == paddle.bfloat16 and unavailable_reason() is None)


def beside(dtype: paddle.dtype | str) -> paddle.dtype | str:
    """The format of activations, norms, biases and adapters beside matrices stored in `dtype`: the same, but float32
    beside bfloat16 on the CPU, where Paddle computes in nothing less.
    """
    is_half = dtype in ("bfloat16", paddle.bfloat16)
    return paddle.float32 if is_half and paddle.get_device() == "cpu" else dtype


def unavailable_reason() -> str | None:
    """What hinders products in bfloat16 on this machine's CPU; None where nothing does."""
    if library.unavailable_reason() is not None:
        return library.unavailable_reason()
    if not _has_products():
        return "this processor has no AVX-512, which oneDNN's bfloat16 products need"
    return None


@functools.cache
def _has_products() -> bool:
    result = ctypes.c_int64()
    library.function("has_bf16_products")(ctypes.byref(result))
    return bool(result.value)


def as_half(x: paddle.Tensor) -> paddle.Tensor:
    """`x` in bfloat16; x itself where it has that format."""
    if x.dtype == paddle.bfloat16:
        return x
    half = library.empty(x.shape, "bfloat16")
    library.function("convert_to_bf16")(library.pointer(x), library.pointer(half), x.size)
    return half


def cached_bf16(x: paddle.Tensor) -> paddle.Tensor:
    """The same, made once for all layers that read x: q, k and v, or gate and up. The copy lives as long as x does.

    Parameters are rounded anew each time: what sets their values leaves no mark on them.
    """
    if x.persistable:
        return as_half(x)
    kept = getattr(x, "_in_half", None)
    if kept is None or kept[0] != x.inplace_version:
        kept = x._in_half = (x.inplace_version, as_half(x))
    return kept[1]
