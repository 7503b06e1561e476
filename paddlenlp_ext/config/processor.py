"""Detect bfloat16 support of the processor without importing Paddle."""

from __future__ import annotations

import functools
from pathlib import Path


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
