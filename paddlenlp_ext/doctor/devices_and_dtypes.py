"""Devices and dtypes on which the doctor runs its checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import paddle

from paddlenlp_ext import devices
from paddlenlp_ext.devices import capabilities
from paddlenlp_ext.ops.cpp import bf16


class Target(NamedTuple):
    """Device, such as "gpu" or "npu:1", and dtype of a run; on a CPU, the activations of a bfloat16 run are float32."""

    device: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.device} {self.dtype}"


CPU_TARGETS = (Target("cpu", "float32"), Target("cpu", "bfloat16"))
GPU_TARGETS = (Target("gpu", "bfloat16"), Target("gpu", "float16"), Target("gpu", "float32"))


def targets_of(device: str | None) -> list[Target]:
    """Return the targets of a device: float32, and the other dtypes that it computes in; None: CPU and GPU."""
    if device is None:
        return [*CPU_TARGETS, *GPU_TARGETS]
    found = capabilities(device)
    dtypes = {"float32": True, "bfloat16": found.bf16 or found.cpp, "float16": found.fp16}
    return [Target(device, dtype) for dtype, is_available in dtypes.items() if is_available]


def unavailable_reason(target: Target) -> str | None:
    """Return the reason why a target is unavailable; None if the target is available."""
    if not capabilities(target.device).cpp:
        return devices.unavailable_reason(target.device)
    return bf16.unavailable_reason() if target.dtype == "bfloat16" else None


def paddle_dtype(name: str) -> paddle.dtype:
    """Return the Paddle dtype for a name such as "float32"."""
    return getattr(paddle, name)


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """Set the default device for new tensors within the block."""
    before = paddle.get_device()
    paddle.set_device(device)
    try:
        yield
    finally:
        paddle.set_device(before)
