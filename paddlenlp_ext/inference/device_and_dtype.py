"""Choose the device and the dtype of a model that is loaded for prediction, serving or export."""

from __future__ import annotations

from paddlenlp_ext.devices import capabilities, choose_device, is_missing_gpu
from paddlenlp_ext.ops.cpp import bf16
from paddlenlp_ext.utils.logging import get_logger


def choose_device_or_cpu(name: str) -> None:
    """Select the device `name`; if it is a GPU and none is available, log a warning and select the CPU.

    Raises:
        ValueError: see `choose_device`.
    """
    if is_missing_gpu(name):
        get_logger().warning("--device %s: no GPU is available; running on the CPU", name)
        name = "cpu"
    choose_device(name)


def choose_dtype(requested: str | None, device: str) -> str:
    """Return the dtype of the weights: the requested dtype, else bfloat16 where Paddle computes in it, else float32.

    On the CPU, the default is float32, and float16 is replaced with bfloat16, or with float32 if the CPU has no
    bfloat16 arithmetic, and a warning is logged.

    Raises:
        ValueError: the requested dtype has no arithmetic on the device.
    """
    found = capabilities(device)
    if not found.cpp:
        if (requested == "bfloat16" and not found.bf16) or (requested == "float16" and not found.fp16):
            raise ValueError(f"--dtype {requested}: Paddle reports no such arithmetic for {device}; use float32")
        return requested or ("bfloat16" if found.bf16 else "float32")
    if requested == "float16":
        dtype = "float32" if bf16.unavailable_reason() is not None else "bfloat16"
        get_logger("paddlenlp_ext.predict").warning("--dtype float16 is not available on the CPU; using %s", dtype)
        return dtype
    if requested == "bfloat16" and bf16.unavailable_reason() is not None:
        raise ValueError(f"--dtype bfloat16 is not available on this CPU: {bf16.unavailable_reason()}; use float32")
    return requested or "float32"
