"""Instruction sets for which wheels contain the C++ library, and the choice of one at run time.

setup.py loads this file by its path to compile the libraries of a wheel. The file therefore imports only the standard
library. Compiling does not need Paddle: the libraries name `libiomp5.so` and `libdnnl.so.3` without a path, and the
dynamic loader uses the copies that Paddle has loaded.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"
LINKED = ("libiomp5.so", "libdnnl.so.3")  # Paddle's copies: a second OpenMP runtime would compete for the cores


@dataclass(frozen=True)
class Level:
    """Instruction set that the library can be compiled for.

    Attributes:
        name: value of PADDLENLP_EXT_LEVEL.
        flags: options of GCC.
        required: flags of /proc/cpuinfo that a processor must have.
    """

    name: str
    flags: tuple[str, ...]
    required: frozenset[str]


def _levels() -> tuple[Level, ...]:
    avx2 = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"})  # x86-64-v3
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}  # x86-64-v4
    vnni = ("-march=x86-64-v4", "-mavx512vnni")
    bf16 = (*vnni, "-mavx512bf16")
    return (
        # oneDNN detects AMX itself; the sources use AMX only if they are compiled with these flags (csrc/amx.h).
        Level(
            "amx",
            (*bf16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
            avx512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
        ),
        Level("avx512-bf16", bf16, avx512 | {"avx512_vnni", "avx512_bf16"}),
        Level("avx512-vnni", vnni, avx512 | {"avx512_vnni"}),
        Level("avx512", ("-march=x86-64-v4",), avx512),
        Level("avx2-vnni", ("-march=x86-64-v3", "-mavxvnni"), avx2 | {"avx_vnni"}),
        Level("avx2", ("-march=x86-64-v3",), avx2),
        Level("portable", ("-march=x86-64",), frozenset()),
    )


LEVELS = _levels()  # best first


def best_level(cpu_flags: Set[str]) -> Level:
    """Return the best level for a processor with these flags of /proc/cpuinfo."""
    return next(level for level in LEVELS if level.required <= cpu_flags)


def compile_options(target: tuple[str, ...]) -> list[str]:
    """Return the options for compiling a source, given the options that select the instructions."""
    return [
        *("-std=c++17", "-O3", *target, "-fopenmp", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-psabi"),
        "-Werror=missing-declarations",  # rejects entry points that differ from their declaration in api*.h
    ]


def prebuilt_library(level: Level, folder: Path) -> Path:
    """Return the path in `folder` of the library that is compiled for `level` from the sources of this installation."""
    sources = sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    return folder / f"native-{digest}-{level.name}.so"


def compile_all(folder: Path, compiler: str = "g++") -> list[Path]:
    """Compile the library for every level into `folder`, and return the paths of the libraries.

    The libraries use the system's libstdc++, because a static copy from GCC 12 needs glibc 2.36.

    Raises:
        RuntimeError: the compiler cannot be run or reports an error; the message contains its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        stubs = Path(scratch)
        for name in LINKED:  # empty libraries; the linker records their names
            _run([compiler, "-shared", "-nostdlib", f"-Wl,-soname,{name}", "-x", "c", os.devnull], stubs / name)
        built = []
        for level in LEVELS:
            library = prebuilt_library(level, folder)  # hashes the sources before the compiler reads them
            command = [compiler, *compile_options(level.flags)]
            objects = {source: stubs / f"{source.stem}-{level.name}.o" for source in sorted(SOURCES.glob("*.cpp"))}
            list(pool.map(lambda source: _run([*command, "-c", str(source)], objects[source]), objects))  # noqa: B023
            linked = ["-Wl,--no-as-needed", "-L", scratch, *(f"-l:{name}" for name in LINKED)]
            _run([compiler, "-s", "-shared", *map(str, objects.values()), *linked], library)
            built.append(library)
    return built


def _run(command: list[str], target: Path) -> None:
    try:
        done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[:2000]}")
