"""C++ library: build, caching, unavailable reasons, and pooled memory."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.cpp import build, levels, library
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.utils.logging import get_logger
from tests.common.marks import needs_cpp

LIBRARIES = Path(paddle.__file__).parent / "libs"
SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer();\nint answer() { return 42; }\n'

get_logger()  # pytest captures loggers that do not propagate only if they exist when a test starts


@pytest.fixture
def not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Reset the library to the state of a fresh process with an empty cache, enabled."""
    monkeypatch.delenv("PADDLENLP_EXT_NATIVE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library._load.cache_clear()
    yield
    library._load.cache_clear()


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replace the package's sources with a folder that has one small source."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "answer.cpp").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


def test_library_without_compiler_logs_reason_once_and_next_backend_runs(not_loaded, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    x = paddle.zeros([2])
    op = DispatchedOp("some op", cpp=(lambda x: "cpp", library.usable), reference=lambda x: "reference")
    assert op.choose(x)(x) == "reference"
    assert library.library() is None and "/no/such/compiler cannot be run" in library.unavailable_reason()
    records = {id(record): record for record in caplog.records}.values()  # two handlers may emit the same record
    warnings = [record.getMessage() for record in records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "/no/such/compiler cannot be run" in warnings[0]
    with pytest.raises(ValueError, match=r"'cpp' was requested, but /no/such/compiler cannot be run"):
        op.choose(x, "cpp")


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None or os.environ.get("PADDLENLP_EXT_NATIVE") == "0",
    reason="no compiler, or the library is disabled",
)
def test_library_with_a_compiler_is_available():
    """Check that the tests of C++ ops are not skipped because the library cannot be built."""
    assert library.unavailable_reason() is None


def test_library_without_compiler_says_what_to_install(not_loaded, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "apt install g++" in library.unavailable_reason()


def test_library_with_environment_variable_is_disabled(not_loaded, monkeypatch):
    monkeypatch.setenv("PADDLENLP_EXT_NATIVE", "0")
    assert library.usable(paddle.zeros([2])) == "the C++ library is disabled by PADDLENLP_EXT_NATIVE=0"


@needs_cpp
def test_usable_with_float64_names_the_dtype(not_loaded):
    assert "float64" in library.usable(paddle.zeros([2], "float64")).lower()


@needs_cpp
def test_build_runs_once_and_again_when_a_source_changes(not_loaded, sources, caplog):
    first = build.build(LIBRARIES)
    assert ctypes.CDLL(str(first)).answer() == 42
    built = first.stat().st_mtime_ns
    assert build.build(LIBRARIES) == first and first.stat().st_mtime_ns == built
    (sources / "answer.cpp").write_text(SOURCE.replace("42", "43"))
    second = build.build(LIBRARIES)
    assert second != first and ctypes.CDLL(str(second)).answer() == 43
    assert not [path for path in first.parent.iterdir() if path.name.startswith(".")]


@needs_cpp
@pytest.mark.parametrize("damage", ["cut in half", "flipped"])
def test_build_with_a_damaged_library_compiles_it_again(damage, not_loaded, sources, caplog):
    library = build.build(LIBRARIES)
    content = library.read_bytes()
    library.unlink()  # a mapped file must not change
    library.write_bytes(content[: len(content) // 2] if damage == "cut in half" else content[:-1] + b"x")
    assert build.build(LIBRARIES) == library
    assert library.read_bytes() == content
    assert "is damaged; compiling it again" in caplog.text


@needs_cpp
def test_build_syncs_files_before_renaming_them(not_loaded, sources, monkeypatch):
    synced, fsync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.add(os.fstat(file).st_ino), fsync(file)))
    folder = build.build(LIBRARIES).parent
    built = [path for path in folder.iterdir() if path.suffix in (".o", ".so")]
    assert len(built) == 2 and synced == {path.stat().st_ino for path in built}


def test_library_with_unwritable_cache_names_the_remedy(not_loaded, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CXX", "true")  # the check comes before the first call of the compiler proper
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "set XDG_CACHE_HOME" in library.unavailable_reason()


def test_library_without_home_directory_names_the_remedy(not_loaded, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setenv("CXX", "true")
    assert "set XDG_CACHE_HOME" in library.unavailable_reason()


@needs_cpp
def test_build_accepts_compiler_of_several_words(not_loaded, sources, monkeypatch):
    monkeypatch.setenv("CXX", "env LANG=C g++")
    assert ctypes.CDLL(str(build.build(LIBRARIES))).answer() == 42


def test_library_with_invalid_cxx_names_it(not_loaded, monkeypatch):
    monkeypatch.setenv("CXX", "g++ '")
    assert 'CXX="g++ \'" is not a valid command line' in library.unavailable_reason()


@needs_cpp
def test_build_with_compile_error_reports_compiler_output(not_loaded, sources):
    (sources / "answer.cpp").write_text("no C++\n")
    with pytest.raises(build.BuildError, match=r"answer\.cpp.*failed:"):
        build.build(LIBRARIES)


@needs_cpp
@pytest.mark.slow
def test_library_of_a_paddle_without_onednn_has_ops_without_products(
    not_loaded, sources, monkeypatch, tmp_path, caplog
):
    (sources / "answer.cpp").unlink()
    for path in (
        *levels.SOURCES.glob("*.h"),
        *(levels.SOURCES / f"{n}.cpp" for n in ("gemm", "scratch", "errors", "threads")),
    ):
        shutil.copy(path, sources)
    libraries = tmp_path / "libs"  # as of a Paddle for ARM: neither oneDNN nor MKL and its OpenMP
    libraries.mkdir()
    monkeypatch.setattr(library, "_LIBRARIES", libraries)
    x = paddle.zeros([2, 3])
    product = DispatchedOp("p", cpp=(None, library.with_products(library.usable)), reference=lambda x: "reference")
    other = DispatchedOp("o", cpp=(lambda x: "cpp", library.usable), reference=None)
    with caplog.at_level(logging.INFO, "paddlenlp_ext"):
        assert product.choose(x)(x) == product.choose(x)(x) == "reference" and other.choose(x)(x) == "cpp"
    records = {id(record): record.getMessage() for record in caplog.records}.values()
    assert sum("this build of Paddle lacks oneDNN" in record for record in records) == 1
    found, has = library.library(), ctypes.c_int64(1)
    found.has_bf16_products(ctypes.byref(has))
    assert has.value == 0 and b"libdnnl" not in library.loaded_path().read_bytes()


READ_PAST_THE_END = """
import sys
import paddlenlp_ext
from paddlenlp_ext.ops.cpp.library import empty, function, pointer
size = int(sys.argv[1])
x, out = empty([size]), empty([2 * size], "bfloat16")
function("convert_to_bf16")(pointer(x), pointer(out), size + 8)
"""


@pytest.mark.skipif(os.environ.get("PADDLENLP_EXT_SANITIZE") != "1", reason="run by make sanitize")
@pytest.mark.parametrize("size", [100, 1_000_000], ids=["Paddle's memory", "pooled memory"])
def test_sanitized_library_reading_past_the_end_of_a_tensor_is_stopped(size):
    done = subprocess.run([sys.executable, "-c", READ_PAST_THE_END, str(size)], capture_output=True, text=True)
    assert done.returncode != 0 and "ERROR: AddressSanitizer" in done.stderr and "gemm.cpp" in done.stderr


def account() -> list[int]:
    """Return the bytes mapped, in use, and in use at the peak."""
    numbers = (ctypes.c_int64 * 3)()
    library.library().buffers_account(numbers)
    return list(numbers)


@needs_cpp
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "uint8"])
@pytest.mark.parametrize("shape", [[3], [0, 5], [7, 300, 301]])
def test_empty_returns_ordinary_tensors(dtype, shape):
    tensor = library.empty(shape, dtype)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (shape, getattr(paddle, dtype), True)
    assert tensor.stop_gradient
    tensor.set_value(paddle.ones(shape).astype(dtype))
    assert (tensor.astype("float32").numpy() == 1).all()


@needs_cpp
def test_empty_reuses_freed_memory_only():
    in_use, freed = library.empty([1 << 20]), library.empty([1 << 20])
    address, before = library.pointer(freed), account()
    del freed
    again = library.empty([(1 << 20) - 5])
    assert library.pointer(again) == address != library.pointer(in_use)
    assert account()[0] == before[0]


@needs_cpp
def test_empty_returns_unused_memory_to_the_system():
    library.library().buffers_release()
    for megabytes in range(1, 40):
        tensor = library.empty([megabytes << 18])
        tensor.zero_()
        del tensor
    mapped, _, peak = account()
    assert mapped <= peak + peak // 16


@needs_cpp
def test_empty_tensor_outlives_its_graph():
    x = paddle.to_tensor(np.ones([600, 600], np.float32), stop_gradient=False)
    view = library.empty([600, 600])
    view.set_value(paddle.full([600, 600], 2.0))
    part = (x * view).reshape([-1])[5:9]
    del view
    library.empty([600, 600]).zero_()
    part.sum().backward()
    assert float(x.grad.sum()) == 8.0
