"""Launch Triton kernels on Paddle tensors."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import paddle

from paddlenlp_ext.ops.dispatch import NotApplicable

_FLOATS = (paddle.float32, paddle.bfloat16, paddle.float16)


def on_gpu_with_triton(x: paddle.Tensor) -> str | None:
    """Return None for a tensor on a GPU with Triton installed; otherwise the reason. A `dispatch.Condition`."""
    if not x.place.is_gpu_place():
        return NotApplicable(f"it needs a GPU and the tensor is on {x.place}")
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def floats_on_gpu_with_triton(x: paddle.Tensor) -> str | None:
    """Return None for at most 32-bit floats on a GPU with Triton; otherwise the reason. A `dispatch.Condition`."""
    if x.place.is_gpu_place() and x.dtype not in _FLOATS:
        return NotApplicable(f"it computes in float32 and the tensor is {x.dtype.name}")
    return on_gpu_with_triton(x)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a kernel on Paddle's current stream; Triton itself uses PyTorch's current stream or CUDA's default one."""
    from triton.runtime import driver

    triton_stream = driver.active.get_current_stream
    driver.active.get_current_stream = _paddle_stream
    try:
        kernel[grid](*arguments, **constants)
    finally:
        driver.active.get_current_stream = triton_stream


def _paddle_stream(device: int) -> int:
    return paddle.device.current_stream(f"gpu:{device}").__cuda_stream__()[1]


def empty_beside(x: paddle.Tensor, shape: Sequence[int] | None = None, dtype: Any = None) -> paddle.Tensor:
    """Return an uninitialized tensor on the device of `x`, by default of its shape and dtype."""
    return paddle.empty(x.shape if shape is None else list(shape), dtype or x.dtype, device=x.place)


def evenly_spaced_rows(x: paddle.Tensor) -> tuple[paddle.Tensor, int]:
    """Return x [..., D] and the distance of its rows in elements; copy x if the distance varies.

    Slices of the last axis are evenly spaced, such as the two halves of a joint projection.
    """
    stride = common_stride(x.shape[:-1], x.strides[:-1]) if x.strides[-1] == 1 else None
    return (x.contiguous(), x.shape[-1]) if stride is None else (x, stride)


def common_stride(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Return the stride of the single axis into which axes can be flattened; None if that needs a copy."""
    axes = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    if any(outer != size * inner for (_, outer), (size, inner) in pairwise(axes)):
        return None
    return axes[-1][1] if axes else 0
