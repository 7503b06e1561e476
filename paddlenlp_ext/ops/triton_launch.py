"""Launch Triton kernels on Paddle tensors."""

from __future__ import annotations

import importlib.util
from typing import Any

import paddle

from paddlenlp_ext.ops.dispatch import NotApplicable


def on_gpu_with_triton(x: paddle.Tensor) -> str | None:
    """Return None for a tensor on a GPU with Triton installed; otherwise the reason. A `dispatch.Condition`."""
    if not x.place.is_gpu_place():
        return NotApplicable(f"it needs a GPU and the tensor is on {x.place}")
    return None if importlib.util.find_spec("triton") else "triton is not installed"


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
