"""Checks of Paddle's installation, and process settings that are applied before Paddle is imported.

The settings make training on CPUs fast: threads, MKL code path, C allocator.

With default settings, Paddle runs one thread, MKL uses a slow code path on AMD processors, and glibc returns every
large freed buffer to the kernel. Training on a CPU is then about four times slower than with the settings of this
module (benchmarks/train_step.py).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # parameters of glibc's mallopt(3)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_OLDEST_MAJOR = 3
_PLUG_IN_FOLDER = "paddle_custom_device"  # beside the package paddle
_LOST_IN_PLUG_IN = (
    "error: the process ended while Paddle loaded the plug-in {}, for example because the driver of the device is "
    "missing or does not fit the plug-in; check the device with the vendor's tool, or set CUSTOM_DEVICE_ROOT= to run "
    "without plug-ins (docs/devices.md)\n"
)
_CPUINFO = Path("/proc/cpuinfo")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_AVX512 = {"avx512f", "avx512cd", "avx512dq", "avx512bw", "avx512vl"}  # required by MKL's AVX-512 path (Skylake-X)


def configure_runtime() -> None:
    """Set threads, MKL code path and C allocator of this process, and hide Paddle's warning about a missing ccache.

    Call this function before importing Paddle; afterwards, the MKL code path cannot be set. Importing paddlenlp_ext
    does not call this function. Environment variables of the user take precedence, except OMP_NUM_THREADS=1 after
    Paddle is imported, because Paddle sets this value itself. Repeated calls are harmless.
    """
    warnings.filterwarnings("ignore", message="No ccache found")
    if sys.modules.get("paddle") is not None:
        # Paddle reads these variables only at import. The import sets OMP_NUM_THREADS=1 if the variable is unset.
        if os.environ.get("OMP_NUM_THREADS") == "1" and "MKL_NUM_THREADS" not in os.environ:
            sys.modules["paddle"].base.core.set_num_threads(threads_per_process())
    elif not any(name in os.environ for name in _THREAD_VARIABLES):
        # Paddle would print an irrelevant warning if OMP_NUM_THREADS were set.
        os.environ["MKL_NUM_THREADS"] = str(threads_per_process())
    code_path = _mkl_code_path(_CPUINFO.read_text(encoding="utf-8")) if _CPUINFO.exists() else None
    if code_path is not None:
        os.environ.setdefault("MKL_DEBUG_CPU_TYPE", code_path)
    _keep_freed_memory()


def require_paddle() -> None:
    """Check that Paddle is installed; import Paddle if there are plug-ins for devices, which Paddle loads then.

    Raises:
        ModuleNotFoundError: Paddle is not installed; the message contains the installation command.
    """
    require_installed_paddle()
    if "paddle" not in sys.modules and (libraries := _plug_ins()):
        with _explained_end(libraries):
            import paddle as paddle


def _plug_ins() -> list[Path]:
    """Return the libraries that Paddle loads as plug-ins for devices."""
    folder = os.environ.get("CUSTOM_DEVICE_ROOT")
    if folder is None:
        spec = importlib.util.find_spec("paddle")
        folder = "" if spec is None or spec.origin is None else str(Path(spec.origin).parents[1] / _PLUG_IN_FOLDER)
    return sorted(Path(folder).glob("*.so")) if folder else []


@contextmanager
def _explained_end(libraries: Sequence[Path]) -> Iterator[None]:
    """Print an error with the remedy if this process ends within the block, in which Paddle loads plug-ins.

    A plug-in that fails, for example because the driver is missing, ends the process without a Python exception. A
    child process therefore waits for the end of the block or of this process, and prints the error.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):  # the handler would run the program's code in the child
                signal.signal(number, signal.SIG_DFL)
        os.close(writer)
        if not os.read(reader, 1):  # the parent process ended
            os.write(2, _LOST_IN_PLUG_IN.format(", ".join(map(str, libraries))).encode())
        os._exit(0)
    os.close(reader)
    try:
        yield
    finally:
        with suppress(BrokenPipeError):  # Ctrl-C has ended the child
            os.write(writer, b"\n")
        os.close(writer)
        os.waitpid(child, 0)


def require_installed_paddle() -> None:
    """Check that Paddle is installed, without importing Paddle.

    Raises:
        ModuleNotFoundError: Paddle is not installed; the message contains the installation command.
    """
    if importlib.util.find_spec("paddle") is None:
        raise ModuleNotFoundError(
            "PaddlePaddle is not installed; on a CPU run: pip install 'paddlenlp-ext[cpu]'; "
            "on a GPU install paddlepaddle-gpu 3.3 from Paddle's own index (see docs/gpu.md)"
        )


def check_paddle_release() -> None:
    """Check that the installed Paddle release is not too old, without importing Paddle.

    Raises:
        ImportError: the release is older than the oldest supported release.
    """
    for package in ("paddlepaddle", "paddlepaddle-gpu"):
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        major = installed.partition(".")[0]
        is_development_build = installed.startswith("0.0.0")
        if major.isdigit() and int(major) < _OLDEST_MAJOR and not is_development_build:
            raise ImportError(
                f"{package} {installed} is too old: paddlenlp_ext supports Paddle 3 and is tested with 3.3; "
                f"run: pip install '{package}==3.3.*'"
            )


def package_version() -> str:
    """Return the version of the installed package paddlenlp-ext; "0+unknown" if the package is not installed."""
    try:
        return metadata.version("paddlenlp-ext")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def threads_per_process() -> int:
    """Return the number of physical cores (at most the container's CPU quota) per rank on this machine; at least 1."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = len({_siblings(cpu) for cpu in allowed})
    return max(1, min(cores, _container_cpus()) // max(1, _local_ranks()))


def _local_ranks() -> int:
    """Return the number of ranks on this machine, from Paddle's environment variables; 1 if none is set."""
    if "PADDLE_LOCAL_SIZE" in os.environ:
        return int(os.environ["PADDLE_LOCAL_SIZE"])
    address = os.environ.get("PADDLE_CURRENT_ENDPOINT", "").rpartition(":")[0]
    endpoints = os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")
    return sum(endpoint.rpartition(":")[0] == address for endpoint in endpoints)


def _container_cpus() -> int:
    """Return the CPU quota of the container (cgroup v2), rounded up to whole processors; `sys.maxsize` if unlimited."""
    quota, _, period = (_CPU_QUOTA.read_text(encoding="utf-8").strip() if _CPU_QUOTA.exists() else "max").partition(" ")
    return sys.maxsize if quota == "max" else max(1, -(-int(quota) // int(period)))


def _siblings(cpu: int) -> str:
    """Return the kernel's list of hardware threads that share a core with `cpu`; if the list is missing, only `cpu`."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return path.read_text(encoding="utf-8").strip() if path.exists() else str(cpu)


def _mkl_code_path(cpuinfo: str) -> str | None:
    """Return the value of MKL_DEBUG_CPU_TYPE for an AMD processor with AVX2 and FMA; None for other processors.

    Without this variable, MKL uses its slowest code path on AMD processors.

    Value   MKL path   fp32 matmul on a Zen 5 core
    "7"     AVX-512    270 GFLOP/s
    "5"     AVX2       135 GFLOP/s
    """
    features = next((line.split() for line in cpuinfo.splitlines() if line.startswith("flags")), [])
    if "AuthenticAMD" not in cpuinfo or not {"avx2", "fma"} <= set(features):
        return None
    return "7" if set(features) >= _AVX512 else "5"


def _keep_freed_memory() -> None:
    """Make glibc reuse freed buffers, because the page faults of a new buffer can take longer than filling the buffer.

    Do nothing if the user has tuned malloc (MALLOC_* or GLIBC_TUNABLES) or if the C library is not glibc.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        mallopt(_M_TOP_PAD, 64 << 20)


def release_freed_memory() -> None:
    """Return freed heap memory to the system; do nothing if the C library is not glibc."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if malloc_trim is not None:
        malloc_trim(0)
