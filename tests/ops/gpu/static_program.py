"""Static programs with Paddle's GPU-only operators, on a build of Paddle that lacks their kernels."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paddle

from tests.common.scripts import ROOT

SOURCE = Path(__file__).with_name("kernel_stubs.cc")


@contextmanager
def static_program(operators: Iterable[str]) -> Iterator[Any]:
    """Yield a static program to which the operators and their gradients can be appended."""
    names = [name.encode() for operator in operators for name in (operator, f"{operator}_grad")]
    stubs = kernel_stubs()
    for name in names:
        stubs.register_stubs(name)
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program()):
            yield paddle.static.default_main_program()
    finally:
        paddle.disable_static()
        for name in names:
            stubs.remove_stubs(name)


@functools.cache
def kernel_stubs() -> ctypes.CDLL:
    """Return the library of kernel_stubs.cc, which is compiled once for each release of Paddle, in two seconds."""
    digest = hashlib.sha256(SOURCE.read_bytes() + paddle.__version__.encode()).hexdigest()
    library = ROOT / "build" / f"kernel_stubs-{digest[:16]}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        package = Path(paddle.__file__).parent
        headers = [f"-I{package / 'include'}", f"-I{package / 'include' / 'third_party'}"]
        linked = [f"-L{package / 'libs'}", "-l:libphi_core.so", "-l:libcommon.so"]
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder, library.name)
            command = [*shlex.split(os.environ.get("CXX", "g++")), "-std=c++17", "-shared", "-fPIC", *headers]
            subprocess.run([*command, "-o", str(built), str(SOURCE), *linked], check=True)
            built.replace(library)
    return ctypes.CDLL(str(library))
