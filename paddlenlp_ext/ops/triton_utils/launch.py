"""Launch Triton kernels on Paddle tensors, without PyTorch.

Triton gets the current device and stream from an active driver. If PyTorch has been imported, Triton's default driver
gets the device and the stream from PyTorch, and fails with a CPU build of PyTorch. Without PyTorch, the default driver
uses CUDA's default stream, which is not synchronized with Paddle's stream. The driver in this module uses Paddle's
stream. The driver is active only during launches, so that PyTorch kernels in the same process still run on PyTorch's
streams. Triton reads only `data_ptr()` and the name of the `dtype` from a tensor, and Paddle's tensors provide both.

The package `use-triton-in-paddle` is not used, because it edits the installed Triton package.

tests/ops/triton_utils/test_launch.py tests this module with a fake CUDA driver library.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import paddle

from paddlenlp_ext.devices import capabilities
from paddlenlp_ext.ops.dispatch import NotApplicable, not_capable, too_old_gpu

_FLOATS = (paddle.float32, paddle.bfloat16, paddle.float16)
_OLDEST_TRITON = (3, 8)
"""First Triton release that can launch kernels without PyTorch; also in pyproject.toml."""


def on_gpu_with_triton(x: paddle.Tensor) -> str | None:
    """Return None for a tensor on a GPU with a recent Triton, otherwise the reason why Triton kernels cannot run."""
    if reason := not_capable(x, "triton") or too_old_gpu(x, "Triton"):
        return reason
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        release = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None  # a development build under another distribution name
    oldest = ".".join(map(str, _OLDEST_TRITON))
    is_old = tuple(map(int, release.split(".")[:2])) < _OLDEST_TRITON
    return f"triton {release} is installed, but {oldest} or later is needed" if is_old else None


def floats_on_gpu_with_triton(x: paddle.Tensor) -> str | None:
    """Return None for float32, bfloat16 or float16 on a GPU with Triton, otherwise the reason against Triton."""
    if capabilities(x.place).triton and x.dtype not in _FLOATS:
        return NotApplicable(f"the backend computes only in float32, but the tensor is {x.dtype.name}")
    return on_gpu_with_triton(x)


def launch(kernel: Any, grid: tuple[int, ...], first: paddle.Tensor, *arguments: Any, **constants: Any) -> None:
    """Run a kernel on Paddle's current stream, on the GPU of the first kernel argument.

    The current device of the process, which may be another GPU, does not change. Multiply-adds are fused, unless
    `enable_fp_fusion=False` is passed. Triton's own default of `enable_fp_fusion` depends on the Triton release.
    Binding the arguments takes most of the Python time of a Triton launch, so arguments are bound once per signature,
    and later launches reuse the compiled kernel.
    """
    device, arguments = first.place.gpu_device_id(), (first, *arguments)
    constants = {"enable_fp_fusion": True, **constants}
    signature = (kernel.fn, device, *map(specialization, arguments), *constants.items())
    active, driver = _drivers()
    with _LOCK:
        previous, current = active._active, driver.get_current_device()
        active.set_active(driver)
        if current != device:
            driver.set_current_device(device)
        try:
            if (compiled := _COMPILED.get(signature)) is None:
                _COMPILED[signature] = kernel.run(*arguments, grid=grid, warmup=False, **constants)
            else:
                own_constants = [constants[name] for name in kernel.arg_names[len(arguments) :]]
                compiled[(*grid, 1, 1)[:3]](*arguments, *own_constants, stream=_current_stream(device))
        finally:
            if current != device:
                driver.set_current_device(current)
            active.set_active(previous)


_LOCK = threading.Lock()
_COMPILED: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels by launch signature."""


def specialization(argument: Any) -> Any:
    """Return a key for the specialization of a kernel argument. Arguments with equal keys can use one compiled kernel.

    Triton specializes kernels on dtypes, the divisibility of pointers and integers by 16, the integer 1, and the size
    of integers (32 or 64 bits).
    """
    kind = type(argument)
    if kind is float or argument is None:
        return kind
    if kind is int:
        return argument % 16 + 2 if 1 < argument < 1 << 31 else argument
    if kind is bool:
        return kind, argument
    return id(argument.dtype), argument.data_ptr() % 16  # dtypes are never freed, and hashing a dtype takes 0.4 us


@functools.cache
def _drivers() -> tuple[Any, Any]:
    """Return Triton's registry of the active driver, and a driver for Paddle."""
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
    from triton.runtime import driver

    class PaddleDriver(CudaDriver):
        """CudaDriver that uses Paddle's streams, with or without PyTorch in the process."""

        def __init__(self) -> None:
            self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
            self.get_device_capability = self.utils.get_device_capability
            self.get_current_device = self.utils.get_current_device
            self.set_current_device = self.utils.set_current_device
            self.get_current_stream = _current_stream

    return driver, PaddleDriver()


def _current_stream(device: int) -> int:
    return cast("Any", paddle.device.cuda.current_stream(device)).cuda_stream  # missing from Paddle's annotations


def empty_beside(x: paddle.Tensor, shape: Sequence[int] | None = None, dtype: Any = None) -> paddle.Tensor:
    """Return an uninitialized tensor on the device of `x`, by default with the same shape and dtype."""
    return paddle.empty(x.shape if shape is None else list(shape), dtype or x.dtype, device=x.place)


def evenly_spaced_rows(x: paddle.Tensor) -> tuple[paddle.Tensor, int]:
    """Return x [..., D] and the row stride in elements; copy x if its rows are not evenly spaced.

    The rows of a slice along the last axis, such as one half of a fused projection, are evenly spaced.
    """
    stride = common_stride(x.shape[:-1], x.strides[:-1]) if x.strides[-1] == 1 else None
    return (x.contiguous(), x.shape[-1]) if stride is None else (x, stride)


def common_stride(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Return the stride of the axis that results from flattening all axes; None if flattening requires a copy."""
    axes = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    if any(outer != size * inner for (_, outer), (size, inner) in pairwise(axes)):
        return None
    return axes[-1][1] if axes else 0
