"""Two GPUs without hardware: a library in place of CUDA's driver, and launches of Triton kernels over it."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

from tests.common.scripts import ROOT, script_environment

SOURCE = Path(__file__).with_name("libcuda.c")


def run_on_fake_gpus(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module of this package in a process that finds libcuda.c, compiled, in place of CUDA's driver."""
    folder = ROOT / "build" / f"fake_gpus-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}"
    library = folder / "libcuda.so.1"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        triton = importlib.util.find_spec("triton")
        assert triton is not None and triton.origin is not None, "the caller has checked that triton is installed"
        headers = Path(triton.origin).parent / "backends" / "nvidia" / "include"
        built = library.with_suffix(f".{os.getpid()}")
        compiler = shlex.split(os.environ.get("CC", "gcc"))
        subprocess.run([*compiler, "-shared", "-fPIC", f"-I{headers}", str(SOURCE), "-o", str(built)], check=True)
        built.replace(library)
    places = dict.fromkeys(("LD_LIBRARY_PATH", "TRITON_LIBCUDA_PATH", "TRITON_CACHE_DIR"), str(folder))
    environment = script_environment(TRITON_INTERPRET="0", **places)
    command = [sys.executable, "-m", f"{__name__}.{module}", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
