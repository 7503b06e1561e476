"""Times on a GPU, and the GPU's bandwidth and matmul rate as a reference, for benchmarks of the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton


def device_of(checks_only: bool) -> str:
    """Return "cuda", or without a GPU "cpu".

    Raises:
        SystemExit: there is no GPU, and `checks_only` is False.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not checks_only:
        raise SystemExit("times need a GPU; with TRITON_INTERPRET=1 and --check the kernels run on a CPU")
    return device


def milliseconds(run: Callable[[], object]) -> float:
    """Return the median time of a call in milliseconds, with the L2 cache flushed before each call."""
    return triton.testing.do_bench(run, return_mode="median")


def copy_bandwidth() -> float:
    """Return the bandwidth of a copy of 2 GB in GB/s; reads and writes both count."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 2 / milliseconds(lambda: target.copy_(source)) / 1e6


def matmul_rate() -> float:
    """Return the TFLOP/s of a matmul of bfloat16, [8192, 4096] by [4096, 32768]."""
    x, weight = (torch.randn(rows, 4096, device="cuda").to(torch.bfloat16) for rows in (8192, 32768))
    return 2 * 8192 * 4096 * 32768 / milliseconds(lambda: x @ weight.T) / 1e9
