"""What must be settled before Paddle is loaded: threads, MKL's code path, the C allocator.

Paddle starts with one thread, its MKL takes a slow path on AMD processors, and glibc hands every large buffer back to
the kernel as soon as it is freed. Together these cost a factor of four on the CPU (benchmarks/train_step.py). Nothing
here overrides what the user has set in the environment.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from pathlib import Path

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # parameters of glibc's mallopt(3)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_CPUINFO = Path("/proc/cpuinfo")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_AVX512 = {"avx512f", "avx512cd", "avx512dq", "avx512bw", "avx512vl"}  # what MKL's path was written for (Skylake-X)


def configure_runtime() -> None:
    """Set threads, MKL's code path and the C allocator of this process, and hide a warning of Paddle's extensions.

    Importing the package does none of this: a program calls it first, before Paddle is imported (later, threads alone
    can be set). What the user has set in the environment stands. A second call changes nothing.
    """
    warnings.filterwarnings("ignore", message="No ccache found")
    if "paddle" in sys.modules:
        # Too late for the environment, and Paddle has written OMP_NUM_THREADS=1 into it where nothing stood.
        if os.environ.get("OMP_NUM_THREADS") == "1" and "MKL_NUM_THREADS" not in os.environ:
            sys.modules["paddle"].base.core.set_num_threads(threads_per_process())
    elif not any(name in os.environ for name in _THREAD_VARIABLES):
        # Not OMP_NUM_THREADS: Paddle answers that one with a warning that does not apply here.
        os.environ["MKL_NUM_THREADS"] = str(threads_per_process())
    code_path = _mkl_code_path(_CPUINFO.read_text()) if _CPUINFO.exists() else None
    if code_path is not None:
        os.environ.setdefault("MKL_DEBUG_CPU_TYPE", code_path)
    _keep_freed_memory()


def require_paddle() -> None:
    """Raise a `ModuleNotFoundError` that says which command installs Paddle, where there is none."""
    import importlib.util

    if importlib.util.find_spec("paddle") is None:
        raise ModuleNotFoundError(
            "PaddlePaddle is not installed. On a CPU: pip install -e '.[cpu]' -c constraints.txt; "
            "on a GPU install paddlepaddle-gpu 3.3 from Paddle's own index, as README.md shows."
        )


def threads_per_process() -> int:
    """Physical cores this process may use, shared among the ranks that the launcher started on this machine."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = len({_siblings(cpu) for cpu in allowed})
    return max(1, min(cores, _container_cpus()) // max(1, _local_ranks()))


def _local_ranks() -> int:
    """Processes that the launcher started on this machine; without GPUs it tells only of everyone's addresses."""
    if "PADDLE_LOCAL_SIZE" in os.environ:
        return int(os.environ["PADDLE_LOCAL_SIZE"])
    own = os.environ.get("PADDLE_CURRENT_ENDPOINT", "").rpartition(":")[0]
    everyone = os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")
    return sum(endpoint.rpartition(":")[0] == own for endpoint in everyone)


def _container_cpus() -> int:
    """Processors that a container's quota amounts to (cgroup v2), rounded up; without a quota, more than any."""
    quota, _, period = (_CPU_QUOTA.read_text().strip() if _CPU_QUOTA.exists() else "max").partition(" ")
    return sys.maxsize if quota == "max" else max(1, -(-int(quota) // int(period)))


def _siblings(cpu: int) -> str:
    """The hardware threads that share a core with `cpu`, as the kernel names them; unknown: a core of its own."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return path.read_text().strip() if path.exists() else str(cpu)


def _mkl_code_path(cpuinfo: str) -> str | None:
    """What MKL must be told on an AMD processor, where it would take its slowest path by itself; None: nothing.

    "7" is its AVX-512 path, twice as fast (fp32 matmul on a Zen 5 core: 270 GFLOP/s against 135) as "5", that of AVX2.
    """
    features = next((line.split() for line in cpuinfo.splitlines() if line.startswith("flags")), [])
    if "AuthenticAMD" not in cpuinfo or not {"avx2", "fma"} <= set(features):
        return None
    return "7" if set(features) >= _AVX512 else "5"


def _keep_freed_memory() -> None:
    """Let glibc reuse freed buffers: each fresh one costs a page fault per 4 KiB, more than the arithmetic on it.

    A user who has tuned malloc (MALLOC_* or GLIBC_TUNABLES) is left alone, and so is any other C library.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        mallopt(_M_TOP_PAD, 64 << 20)
