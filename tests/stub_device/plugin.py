"""Build the plug-in of the device type "stub", and run Python with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import paddle

SOURCES = sorted(Path(__file__).parent.glob("*.cc"))
COMPILER = shutil.which("g++")
DEVICES = ("stub:0", "stub:1")


def build(folder: Path) -> Path:
    """Compile the plug-in into a folder, which CUSTOM_DEVICE_ROOT can name, and return the folder."""
    assert COMPILER is not None
    headers = Path(paddle.__file__).parent / "include"
    options = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-std=c++17", f"-I{headers}"]
    library = folder / "libpaddle-stub.so"
    subprocess.run([COMPILER, *options, *map(str, SOURCES), "-o", str(library)], check=True)
    return folder


def run_with_stub(
    folder: Path, *words: str | Path, timeout: float = 300, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` in a process with the plug-in; `variables` are environment variables of the plug-in."""
    environment = {**os.environ, **variables_of(folder), **variables}
    command = [sys.executable, "-W", "ignore", *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


def variables_of(folder: Path) -> dict[str, str]:
    """Return the environment variables with which Paddle loads the plug-in of a folder."""
    return {"CUSTOM_DEVICE_ROOT": str(folder), "FLAGS_use_stride_kernel": "0", "GLOG_minloglevel": "2"}
