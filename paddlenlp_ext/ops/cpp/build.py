"""Build the C++ library: compile each source of `csrc/` in a separate process, then link.

Objects and library are stored in the user's cache under a hash of sources, flags, Paddle version and processor. After a
change of one of these inputs, only the affected files are rebuilt. The SHA-256 of the library is stored in a separate
file to detect damage, because loading a truncated library would kill the process with a bus error.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from pathlib import Path

import paddle

from paddlenlp_ext.ops.cpp.levels import (
    LEVELS,
    LINKED,
    PREBUILT,
    SOURCES,
    best_level,
    compile_options,
    prebuilt_library,
)
from paddlenlp_ext.utils.files import cache_folder, write_text
from paddlenlp_ext.utils.locks import waiting_lock
from paddlenlp_ext.utils.logging import get_logger

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g", "-O1")
_CPUINFO = Path("/proc/cpuinfo")
_LEVELS_BY_NAME = {level.name: level for level in LEVELS}


class BuildError(Exception):
    """Error: the library cannot be built on this machine; the message states the cause."""


def find_prebuilt() -> Path | None:
    """Return the installed wheel's library for PADDLENLP_EXT_LEVEL or this processor; None if the wheel has none.

    Raises:
        BuildError: PADDLENLP_EXT_LEVEL is not the name of a level.
    """
    requested = _requested_level()
    if requested == "native" or os.environ.get("PADDLENLP_EXT_SANITIZE") == "1" or not PREBUILT.is_dir():
        return None
    level = best_level(cpu_flags()) if requested is None else _LEVELS_BY_NAME[requested]
    library = prebuilt_library(level, PREBUILT)
    return library if library.exists() else None


def cpu_flags() -> frozenset[str]:
    """Return the flags of the processor in /proc/cpuinfo."""
    lines = _cpuinfo_lines("flags")
    return frozenset(lines[0].partition(":")[2].split()) if lines else frozenset()


def _requested_level() -> str | None:
    """Return the value of PADDLENLP_EXT_LEVEL: the name of a level, "native", or None if unset.

    Raises:
        BuildError: PADDLENLP_EXT_LEVEL is neither the name of a level nor "native".
    """
    requested = os.environ.get("PADDLENLP_EXT_LEVEL") or None
    if requested not in (None, "native", *_LEVELS_BY_NAME):
        raise BuildError(f"PADDLENLP_EXT_LEVEL={requested} is not one of native, {', '.join(_LEVELS_BY_NAME)}")
    return requested


def build(libraries: Path) -> Path:
    """Return the path of the shared library; compile the library if it is damaged or missing from the cache.

    The code is compiled for this processor, or for the instruction set that PADDLENLP_EXT_LEVEL names.

    Args:
        libraries: Paddle's directory of shared libraries.

    Raises:
        BuildError: not Linux, no usable compiler, an unwritable cache, or a compiler error.
    """
    requested = _requested_level()
    target = ("-march=native",) if requested in (None, "native") else _LEVELS_BY_NAME[requested].flags
    compiler = _find_compiler()
    try:
        folder = cache_folder("native")
    except RuntimeError as error:  # a user without an entry in /etc/passwd, as in some containers
        raise BuildError(
            "the user has no home directory for the cache; set XDG_CACHE_HOME to a writable directory"
        ) from error
    sanitizers = SANITIZERS if os.environ.get("PADDLENLP_EXT_SANITIZE") == "1" else ()
    command = [*compiler, *compile_options(target), *sanitizers]
    toolchain = " ".join([*command, _version(compiler), paddle.__version__, str(libraries), _processor()])
    headers = b"".join(header.read_bytes() for header in sorted(SOURCES.glob("*.h")))
    objects = {
        source: folder / f"{source.stem}-{_digest(toolchain.encode(), headers, source.read_bytes())}.o"
        for source in sorted(SOURCES.glob("*.cpp"))
    }
    library = folder / f"native-{_digest(*(path.name.encode() for path in objects.values()))}.so"
    if not _is_intact(library):
        _require_writable(folder)
        with _only_builder(folder):
            if not _is_intact(library):
                if _sum_file(library).exists() and library.exists():
                    get_logger(__name__).warning("%s is damaged; compiling it again", library)
                    for path in objects.values():  # the objects may be damaged too
                        path.unlink(missing_ok=True)
                _compile_all(command, {source: path for source, path in objects.items() if not path.exists()})
                # Without --no-as-needed, some compilers leave out oneDNN, because its symbols are weak (gemm.cpp).
                linked = ["-L", str(libraries), f"-Wl,-rpath,{libraries},--no-as-needed"]
                # If Paddle has no OpenMP library, -fopenmp links GCC's OpenMP. If Paddle has no oneDNN, matrix products
                # are unavailable (library.py).
                linked += [f"-l:{name}" for name in LINKED if (libraries / name).exists()]
                linked += [] if (libraries / LINKED[0]).exists() else ["-fopenmp"]
                shared = ("-shared", "-Wl,-z,defs", *map(str, objects.values()))
                _run([*compiler, *sanitizers, *shared, *linked], library)
                write_text(_sum_file(library), _sum_of(library))
    return library


@contextmanager
def _only_builder(folder: Path) -> Iterator[None]:
    """Allow one process to build at a time; other processes, such as other ranks, wait and reuse the library."""
    with ExitStack() as stack:
        try:
            stack.enter_context(waiting_lock(folder / ".lock", folder, "set XDG_CACHE_HOME to another directory"))
        except ValueError as error:
            raise BuildError(str(error)) from error
        yield


def _is_intact(library: Path) -> bool:
    """Return whether the library exists and its SHA-256 equals the stored SHA-256."""
    stored = _sum_file(library)
    return library.is_file() and stored.is_file() and stored.read_bytes() == _sum_of(library).encode()


def _sum_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _sum_of(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise BuildError(f"{folder} is not writable; set XDG_CACHE_HOME to a writable directory")


def _find_compiler() -> list[str]:
    """Return the compiler command as a list of words; CXX may be "ccache g++".

    Raises:
        BuildError: not Linux, an invalid CXX, or no compiler.
    """
    if sys.platform != "linux":
        raise BuildError(f"the C++ library can be built only on Linux, not on {sys.platform}")
    try:
        compiler = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BuildError(f"CXX={os.environ['CXX']!r} is not a valid command line: {error}") from error
    if compiler:
        return compiler
    found = shutil.which("g++")
    if found is None:
        raise BuildError("no C++ compiler was found; install g++ (on Debian and Ubuntu: apt install g++)")
    return [found]


def _compile_all(command: list[str], objects: dict[Path, Path]) -> None:
    logger = get_logger(__name__)
    started = time.perf_counter()
    logger.info("compiling %d C++ sources into %s; later runs reuse the result", len(objects), cache_folder("native"))
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        jobs = {pool.submit(_run, [*command, "-c", str(source)], target): source for source, target in objects.items()}
        for number, job in enumerate(as_completed(jobs), 1):
            job.result()
            logger.debug("compiled %s (%d of %d)", jobs[job].name, number, len(objects))
    logger.info("compiled the C++ library in %.0f s", time.perf_counter() - started)


def _run(command: list[str], target: Path) -> None:
    """Run a compiler command, and create `target` atomically, so that a power failure cannot leave a truncated file."""
    draft = target.with_name(f".{os.getpid()}-{target.name}")
    try:
        done = subprocess.run([*command, "-o", str(draft)], capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        draft.unlink(missing_ok=True)
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr[:2000]}")
    with draft.open("rb") as written:
        os.fsync(written.fileno())
    draft.replace(target)


def _version(compiler: list[str]) -> str:
    try:
        return subprocess.run([*compiler, "-dumpfullversion"], capture_output=True, text=True).stdout.strip()
    except OSError as error:
        raise BuildError(f"{compiler[0]} cannot be run: {error}") from error


def _processor() -> str:
    """Return the processor's model and instruction sets, on which the code generated by `-march=native` depends."""
    return " ".join([platform.machine(), *sorted(set(_cpuinfo_lines("model name", "flags")))])


def _cpuinfo_lines(*names: str) -> list[str]:
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.exists() else []
    return [line for line in lines if line.startswith(names)]


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]
