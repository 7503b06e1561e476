"""Detect GPUs and the processor's bfloat16 support without importing Paddle."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from pathlib import Path

_GPU_NODES = ("/dev/nvidiactl", "/dev/dxg")


def has_gpu() -> bool:
    """Return whether the installed Paddle is a GPU build and a GPU is visible."""
    return not _gpus_hidden() and _paddle_built_for_gpu() and any(Path(node).exists() for node in _GPU_NODES)


def has_bf16_arithmetic() -> bool:
    """Return whether the processor has bfloat16 matmul instructions (`avx512_bf16` or `amx_bf16` in /proc/cpuinfo)."""
    return not _processor_flags().isdisjoint(("avx512_bf16", "amx_bf16"))


@functools.cache
def _processor_flags() -> frozenset[str]:
    """Return the CPU flags in /proc/cpuinfo; empty if the file is missing."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), ":")
    return frozenset(flags.partition(":")[2].split())


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
