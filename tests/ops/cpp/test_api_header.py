"""Entry points of the C++ library: signatures read from its headers, and errors as Python exceptions."""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path

import paddle
import pytest

from paddlenlp_ext.ops.cpp import build, library
from paddlenlp_ext.ops.cpp.api_header import HEADERS, parameter_types, struct
from paddlenlp_ext.ops.cpp.library import function
from tests.common.marks import needs_cpp

LIBRARIES = Path(paddle.__file__).parent / "libs"
DECLARATIONS = "".join(header.read_text() for header in HEADERS)
STRUCTS = re.findall(r"^struct (\w+)", DECLARATIONS, flags=re.MULTILINE)
HUGE = 1 << 45
"""Elements of an array that no machine has memory for."""

pytestmark = needs_cpp


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Create a source folder for the build that contains only the headers."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    for header in HEADERS:
        shutil.copy(header, folder)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_parameter_types_are_ctypes_of_the_headers():
    types = parameter_types()
    pointer, integer, single, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_bool
    assert types["rms_norm_forward"] == [pointer, pointer, single, integer, integer, pointer, pointer]
    assert types["linear_forward"] == [pointer] * 4 + [integer] * 3 + [flag]
    assert types["buffers_release"] == []
    assert len(types) == DECLARATIONS.count("\nStatus ")


def test_library_exports_every_declared_entry_point():
    assert [name for name in parameter_types() if not hasattr(library.library(), name)] == []


def test_struct_sizes_match_the_compiler(sources):
    sizes = "".join(f"sizeof(plx::{name}), " for name in STRUCTS)
    declaration = '__attribute__((visibility("default"))) extern const long sizes[];'
    (sources / "sizes.cpp").write_text(f'#include "api.h"\n{declaration}\nconst long sizes[] = {{{sizes}}};\n')
    compiled = (ctypes.c_long * len(STRUCTS)).in_dll(ctypes.CDLL(str(build.build(LIBRARIES))), "sizes")
    assert STRUCTS and list(compiled) == [ctypes.sizeof(struct(name)) for name in STRUCTS]


@pytest.mark.parametrize("parameters", ["float count", "i64 count, i64 more", "i64* count"])
def test_build_with_definition_unlike_its_declaration_raises(sources, parameters):
    (sources / "wrong.cpp").write_text(
        f'#include "api.h"\nnamespace plx {{\nStatus set_threads({parameters}) {{ return OK; }}\n}}\n'
    )
    with pytest.raises(build.BuildError, match="no previous declaration"):
        build.build(LIBRARIES)


@pytest.mark.parametrize("arguments", [(), (1, 2), (1.5,), ("1",)])
def test_function_with_arguments_unlike_the_declaration_raises_type_error(arguments):
    threads = library.threads()
    with pytest.raises((TypeError, ctypes.ArgumentError)):
        function("set_threads")(*arguments)
    library.set_threads(threads)


def test_function_without_memory_raises_memory_error():
    with pytest.raises(MemoryError, match=r"lora_update_forward: cannot allocate \d+ bytes"):
        function("lora_update_forward")(None, None, None, None, None, HUGE, 4, 4, 8, 1.0, True)
    with pytest.raises(MemoryError, match=r"a tensor of shape \[35184372088832\] in float32"):
        library.empty([HUGE])


@pytest.mark.parametrize("threads", [1, 2])
def test_function_without_memory_in_a_thread_raises_memory_error(cpp_threads, threads):
    cpp_threads(threads)
    weight = struct("QuantizedWeight")(out=8, block=32, **{"in": HUGE})
    with pytest.raises(MemoryError, match=r"quantized_linear_small_batch: cannot allocate \d+ bytes"):
        function("quantized_linear_small_batch")(None, ctypes.byref(weight), None, 1)


def test_function_with_onednn_failure_raises_runtime_error_with_its_status():
    message = (
        r"linear_forward: oneDNN matrix product \[4, \d+\] x \[\d+, 4\] failed with status 2 \(invalid arguments\)"
    )
    with pytest.raises(RuntimeError, match=message):
        function("linear_forward")(None, None, None, None, 4, 1 << 62, 4, False)


def test_function_with_invalid_embedding_id_raises_value_error():
    ids = (ctypes.c_int64 * 3)(4, -1, 9)
    with pytest.raises(ValueError, match="embedding_rows: ids range from -1 to 9, but the embedding has 5 rows"):
        function("embedding_rows")(None, ids, None, 3, 5, 4)


def test_function_after_an_error_works():
    test_function_without_memory_raises_memory_error()
    x = paddle.to_tensor([1.0, 2.5])
    out = library.empty([2], "bfloat16")
    function("convert_to_bf16")(library.pointer(x), library.pointer(out), 2)
    assert out.astype("float32").tolist() == [1.0, 2.5]
