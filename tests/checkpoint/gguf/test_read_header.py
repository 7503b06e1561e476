"""Test the header of GGUF files: values of every type, and lengths that do not fit the file."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from paddlenlp_ext.checkpoint.gguf import read_header as header_module
from paddlenlp_ext.checkpoint.gguf.read_header import read_header

VALUES = {
    "u8": 7,
    "text": "gr\u00fc\u00dfe",
    "float": 0.5,
    "flag": True,
    "texts": ["a", "", "\u2581b"],
    "numbers": [3, -4],
    "flags": [True, False],
    "empty": [],
}


def write(path: Path, alignment: int = 32) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    writer.add_uint8("u8", VALUES["u8"])
    writer.add_string("text", VALUES["text"])
    writer.add_float32("float", VALUES["float"])
    writer.add_bool("flag", VALUES["flag"])
    for name in ("texts", "numbers", "flags"):
        writer.add_array(name, VALUES[name])
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", np.arange(64, dtype=np.float16).reshape(2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [32, 64])
def test_read_header_finds_values_and_tensors_as_the_gguf_library(alignment, tmp_path):
    path = write(tmp_path / "a.gguf", alignment)
    metadata, tensors = read_header(path)
    reader = gguf.GGUFReader(path)
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert metadata == expected
    found = [(name, t.type, t.shape, t.start, t.num_bytes) for name, t in tensors.items()]
    assert found == [
        (t.name, t.tensor_type.name, tuple(t.shape.tolist()[::-1]), t.data_offset, t.n_bytes) for t in reader.tensors
    ]


def header(*, magic: bytes = b"GGUF", version: int = 3, keys: list[bytes] | None = None, tensors: Any = ()) -> bytes:
    keys = keys or []
    return struct.pack("<4sIQQ", magic, version, len(tensors), len(keys)) + b"".join([*keys, *tensors]) + bytes(64)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def array(kind: int, count: int) -> bytes:
    return text("k") + struct.pack("<IIQ", 9, kind, count)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (header(magic=b"GGML"), "it does not begin with GGUF"),
        (header(version=1), "version 1"),
        (header(version=3 << 24), "big-endian"),
        (header(keys=[struct.pack("<Q", 2**63)]), f"{2**63} bytes needed at offset 32"),
        (header(keys=[array(0, 2**62)]), f"an array of {2**62} items"),
        (header(keys=[array(8, 2**40)]), f"an array of {2**40} items"),
        (header(keys=[array(9, 1)]), "array item type 9"),
        (header(keys=[array(77, 1)]), "array item type 77"),
        (header(keys=[text("k") + struct.pack("<I", 13)]), "unknown value type 13"),
        (header(keys=[text("k") + struct.pack("<IB", 0, 1)] * 2), "the key k occurs twice"),
        (header(keys=[text("general.alignment") + struct.pack("<II", 4, 0)]), "general.alignment is 0"),
        (header(tensors=[tensor("a", (2**32, 2**32))]), "tensor a ends at byte"),
        (header(tensors=[tensor("a", (4,), offset=2**63)]), "tensor a ends at byte"),
        (header(tensors=[tensor("a", (33,), kind=2)]), "rows of 33 weights, not a multiple of the block size 32"),
        (header(tensors=[tensor("a", (1,) * 5)]), "tensor a has 5 axes"),
        (header(tensors=[tensor("a", (1,), kind=999)]), "999"),
        (header(tensors=[tensor("a", (4,)), tensor("b", (4,), offset=8)]), "tensors a and b overlap"),
        (header(tensors=[tensor("a", (4,)), tensor("a", (1,), offset=32)]), "tensor a occurs twice"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 2**64 - 1, 2**64 - 1), "bytes needed at offset 24"),
    ],
)
def test_read_header_with_lengths_that_do_not_fit_the_file_raises_at_once(content, message, tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    started = time.perf_counter()
    with pytest.raises(ValueError, match=message) as caught:
        read_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert time.perf_counter() - started < 1 and peak < 1 << 20
    assert str(path) in str(caught.value)


def test_read_header_bounds_the_items_of_all_arrays(tmp_path, monkeypatch):
    monkeypatch.setattr(header_module, "_MAX_ITEMS", 3)
    with pytest.raises(ValueError, match="an array of 2 items is too large, with 5 items in all arrays so far"):
        read_header(write(tmp_path / "a.gguf"))
