"""Types of devices, what each type can do, and the choice of a device.

No other module distinguishes GPUs from other accelerators. A device is named "cpu", or by its type and optionally an
index, such as "gpu" or "npu:1". Paddle is imported only for devices other than the CPU and GPUs, because the import
takes a second.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AUTO = "auto"
"""Device name that selects a GPU if there is one, and otherwise the CPU."""

_GPU_NODES = ("/dev/nvidiactl", "/dev/dxg")


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Capabilities of a device type, in addition to Paddle's float32 operators.

    Attributes:
        cpp: the device is the CPU; its tensors are in the memory that NumPy and the C++ library read.
        bf16: Paddle multiplies matrices in bfloat16.
        fp16: Paddle multiplies matrices in float16.
        flash_mask: Paddle has FlashMask kernels.
        triton: the Triton kernels of this package run, in CUDA streams.
        weight_only: Paddle multiplies by weights in 8 or 4 bits.
        pinned_memory: Paddle moves tensors to page-locked host memory.
        memory_figures: Paddle counts the bytes of tensors on the device.
    """

    cpp: bool = False
    bf16: bool = False
    fp16: bool = False
    flash_mask: bool = False
    triton: bool = False
    weight_only: bool = False
    pinned_memory: bool = False
    memory_figures: bool = False


_KNOWN = {
    "cpu": Capabilities(cpp=True),
    "gpu": Capabilities(
        bf16=True,
        fp16=True,
        flash_mask=True,
        triton=True,
        weight_only=True,
        pinned_memory=True,
        memory_figures=True,
    ),
}


@dataclass(frozen=True)
class AbsentGpu:
    """Substitute for the place of a GPU that this machine lacks (default: Hopper)."""

    compute_capability: tuple[int, int] = (9, 0)

    def is_cpu_place(self) -> bool:
        return False


def capabilities(device: Any) -> Capabilities:
    """Return the capabilities of a device; `device` is a name or a Paddle place.

    A device that is not available has no capabilities, except for a GPU.
    """
    kind = device_type(device)
    return _KNOWN.get(kind) or _reported_capabilities(kind)


@functools.cache
def _reported_capabilities(kind: str) -> Capabilities:
    """Return the capabilities that Paddle reports for a device type other than the CPU and GPUs."""
    if kind not in available_types():
        return Capabilities()
    import paddle

    return Capabilities(
        bf16=paddle.amp.is_bfloat16_supported(kind),
        fp16=paddle.amp.is_float16_supported(kind),
        memory_figures=kind in _custom_types(),
    )


def device_type(device: Any) -> str:
    """Return the type of a device, such as "gpu" for "gpu:1"; `device` is a name, also "auto", or a Paddle place."""
    if isinstance(device, str):
        return resolve_auto(device).partition(":")[0]
    if isinstance(device, AbsentGpu) or device.is_gpu_place():
        return "gpu"
    if device.is_custom_place():
        return device.custom_device_type()
    return "xpu" if device.is_xpu_place() else "cpu"


def resolve_auto(device: str) -> str:
    """Return the device that "auto" selects; other names are returned unchanged."""
    return default_device() if device == AUTO else device


def default_device() -> str:
    """Return the device that "auto" selects."""
    return "gpu" if has_gpu() else "cpu"


def available_types() -> list[str]:
    """Return the device types that are available with this Paddle on this machine, "cpu" first."""
    import paddle

    xpu = ["xpu"] if paddle.is_compiled_with_xpu() and paddle.device.xpu.device_count() > 0 else []
    return ["cpu", *(["gpu"] if has_gpu() else []), *xpu, *_custom_types()]


def device_count(kind: str) -> int:
    """Return the number of available devices of a type."""
    import paddle

    if kind in _custom_types():
        return sum(device_type(name) == kind for name in paddle.device.get_available_custom_device() or [])
    if kind == "xpu":
        return paddle.device.xpu.device_count()
    return paddle.device.cuda.device_count() if kind == "gpu" else 1


def unavailable_reason(device: str) -> str | None:
    """Return the reason why a device is unavailable, with the available devices; None if the device is available.

    For the CPU and for a GPU without an index, Paddle is not imported.
    """
    kind, colon, index = device.partition(":")
    if device in ("cpu", "gpu", AUTO):
        return f"device gpu: {_NO_GPU}; use --device cpu" if is_missing_gpu(device) else None
    available = available_types()
    if kind in available and (not colon or (kind != "cpu" and index.isdigit() and int(index) < device_count(kind))):
        return None
    found = ", ".join(_with_indices(each) for each in available)
    return f"device {device!r} is not available; this Paddle has: {found}{_plugin_hint(kind, available)}"


_NO_GPU = "this Paddle is not built for GPUs, or no GPU is visible"


def _with_indices(kind: str) -> str:
    count = 1 if kind == "cpu" else device_count(kind)
    return kind if count < 2 else f"{kind} ({kind}:0 to {kind}:{count - 1})"


def _plugin_hint(kind: str, available: list[str]) -> str:
    if kind in (*available, "gpu", "xpu", AUTO) or not re.fullmatch(r"[a-z_]+", kind):
        return ""
    return f"; other devices need a plug-in from their vendor, such as paddle-custom-{kind} (docs/devices.md)"


def choose_device(name: str) -> None:
    """Select a Paddle device, for example "cpu", "gpu:1", "npu" or "auto".

    Raises:
        ValueError: the device is not available; the message lists the available devices.
    """
    reason = unavailable_reason(name)
    if reason is not None:
        raise ValueError(reason)
    import paddle

    paddle.set_device(resolve_auto(name))


def place_program(config: Any, device: str) -> None:
    """Let a `paddle.inference.Config` run its program on a device other than the CPU."""
    kind, index = device_type(device), int(device.partition(":")[2] or 0)
    if kind == "gpu":
        config.enable_use_gpu(100, index)
    elif kind == "xpu":
        config.enable_xpu()
        config.set_xpu_device_id(index)
    else:
        config.enable_custom_device(kind, index)


def device_name(place: Any) -> str:
    """Return the name of a Paddle place with its index, such as "gpu:1"; "cpu" for the CPU."""
    kind = device_type(place)
    if kind == "cpu":
        return kind
    index = {"gpu": "gpu_device_id", "xpu": "xpu_device_id"}.get(kind, "custom_device_id")
    return f"{kind}:{getattr(place, index)()}"


def place_of(device: str) -> Any:
    """Return the Paddle place of a device; for a GPU that this machine lacks, a substitute."""
    if is_missing_gpu(device):
        return AbsentGpu()
    import paddle

    return paddle.device.device_to_place(resolve_auto(device))


def compute_capability(place: Any) -> tuple[int, int]:
    """Return the compute capability of a GPU, such as (9, 0)."""
    if isinstance(place, AbsentGpu):
        return place.compute_capability
    import paddle

    return paddle.device.cuda.get_device_capability(place.gpu_device_id())


def model_of(device: str) -> str | None:
    """Return the product name, compute capability and memory of a GPU; None for other devices."""
    if device_type(device) != "gpu":
        return None
    import paddle

    properties = paddle.device.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    return f"{properties.name}, compute capability {capability}, {properties.total_memory / 2**30:.0f} GiB"


def is_missing_gpu(device: str) -> bool:
    """Return whether a device is a GPU although no GPU is available."""
    return device_type(device) == "gpu" and not has_gpu()


def has_gpu() -> bool:
    """Return whether the installed Paddle is a GPU build and a GPU is visible; Paddle is not imported."""
    return not _gpus_hidden() and _paddle_built_for_gpu() and any(Path(node).exists() for node in _GPU_NODES)


def _custom_types() -> list[str]:
    """Return the device types of vendors' plug-ins that have a device."""
    import paddle

    return list(dict.fromkeys(map(device_type, paddle.device.get_available_custom_device() or [])))


def _gpus_hidden() -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides all GPUs, because the variable is empty or begins with -1."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in ("", "-1")


def _paddle_built_for_gpu() -> bool:
    # Read the version file as text, because importing Paddle takes seconds.
    spec = importlib.util.find_spec("paddle")
    if spec is None or spec.origin is None:
        return False
    version_file = Path(spec.origin).parent / "version" / "__init__.py"
    match = re.search(r"^cuda_version\s*=\s*'([^']*)'", version_file.read_text(encoding="utf-8"), re.MULTILINE)
    return match is not None and match.group(1) != "False"
