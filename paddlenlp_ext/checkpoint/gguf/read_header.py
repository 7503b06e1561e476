"""Parse the header of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Each length is compared with the file size before the bytes are read.

magic, version, number of tensors, number of keys
keys:    name, type, value                        a value is a number, a string, or an array of numbers or strings
tensors: name, sizes (last axis first), type, offset from the first aligned byte after the header
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""Type of a numeric or boolean value -> format code of the `struct` module."""
_MAX_ITEMS = 1 << 23
"""Maximum total number of array items. The limit bounds memory: Python objects need up to 32 times the file size."""
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GgufTensor:
    """Location of a stored tensor.

    Attributes:
        type: name of the GGML type, such as F16 or Q8_0.
        shape: shape, rows first as in NumPy.
        path: the file.
        start: file offset of the first byte.
        num_bytes: number of bytes in the file.
    """

    type: str
    shape: tuple[int, ...]
    path: Path
    start: int
    num_bytes: int


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Return two dicts: the metadata of a file by key, and the locations of its tensors by name.

    Raises:
        ValueError: the file is damaged, truncated, big-endian or not GGUF; a length, size or offset exceeds the file;
            or two tensors overlap.
    """
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _read(_Cursor(content), path)
    except ValueError as error:  # mmap raises ValueError for an empty file
        raise ValueError(f"{path}: not a readable GGUF file ({error}); use another copy") from error


class _Cursor:
    """Reader of a file's header, with its position in the file."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.size, self.at = content, len(content), 0
        self.num_items = 0

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes.

        Raises:
            ValueError: the file is too short.
        """
        if count > self.size - self.at:
            raise ValueError(f"{count} bytes needed at offset {self.at}, but the file has {self.size} bytes")
        start, self.at = self.at, self.at + count
        return self.content[start : self.at]

    def number(self, kind: int) -> int | float:
        """Read a number of the type `kind`, a key of `_SCALARS`."""
        code = f"<{_SCALARS[kind]}"
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def whole(self, kind: int) -> int:
        """Read an integer of the type `kind`: UINT32 (4) or UINT64 (10)."""
        value = self.number(kind)
        assert isinstance(value, int)
        return value

    def text(self) -> str:
        """Read a string."""
        return self.take(self.whole(10)).decode("utf-8")

    def value(self, kind: int) -> Any:
        """Read a value of the type `kind`."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.whole(_UINT32), self.whole(10))
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        value = self.number(kind)
        return bool(value) if kind == _BOOL else value

    def _array(self, kind: int, count: int) -> list[Any]:
        self.num_items += count
        if count > self.size - self.at or self.num_items > _MAX_ITEMS:
            raise ValueError(
                f"an array of {count} items is too large, with {self.num_items} items in all arrays so far"
            )
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"unknown array item type {kind}")
        dtype = np.dtype(f"<{_SCALARS[kind]}")
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        return (values != 0).tolist() if kind == _BOOL else values.tolist()


def _read(cursor: _Cursor, path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    if cursor.take(4) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = cursor.whole(_UINT32)
    if version % 65536 == 0:
        raise ValueError("it is big-endian")
    if version not in _VERSIONS:
        raise ValueError(f"unknown format version {version}")
    num_tensors, num_keys = cursor.whole(10), cursor.whole(10)
    metadata: dict[str, Any] = {}
    alignment = _DEFAULT_ALIGNMENT
    for _ in range(num_keys):
        key, kind = cursor.text(), cursor.whole(_UINT32)
        if key in metadata:
            raise ValueError(f"the key {key} occurs twice")
        metadata[key] = cursor.value(kind)
        if key == "general.alignment":
            alignment = metadata[key]
            if kind != _UINT32 or alignment.bit_count() != 1 or alignment > _MAX_ALIGNMENT:
                raise ValueError(f"general.alignment is {alignment}, not a power of 2 up to {_MAX_ALIGNMENT}")
    entries = [_tensor_entry(cursor) for _ in range(num_tensors)]
    return metadata, _locate(entries, path, -(-cursor.at // alignment) * alignment, cursor.size)


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Return the name, shape (rows first), type and offset of the next tensor."""
    name, num_dims = cursor.text(), cursor.whole(_UINT32)
    if not 1 <= num_dims <= _MAX_DIMS:
        raise ValueError(f"tensor {name} has {num_dims} axes")
    shape = tuple(cursor.whole(10) for _ in range(num_dims))[::-1]
    return name, shape, cursor.whole(_UINT32), cursor.whole(10)


def _locate(
    entries: list[tuple[str, tuple[int, ...], int, int]], path: Path, data_start: int, size: int
) -> dict[str, GgufTensor]:
    """Return a dict from tensor names to the locations of the tensors.

    Args:
        entries: name, shape, type and offset of each tensor.
        path: the file.
        data_start: file offset of the first aligned byte after the header.
        size: size of the file in bytes.

    Raises:
        ValueError: a name occurs twice, a type is unknown, the row width is not a multiple of the block size, a tensor
            ends outside the file, or two tensors overlap.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise ValueError(f"tensor {name} occurs twice")
        stored = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[stored]
        if shape[-1] % block:
            raise ValueError(f"tensor {name} has rows of {shape[-1]} weights, not a multiple of the block size {block}")
        num_bytes = math.prod(shape) // block * block_bytes
        if data_start + offset + num_bytes > size:
            raise ValueError(
                f"tensor {name} ends at byte {data_start + offset + num_bytes}, but the file has {size} bytes"
            )
        tensors[name] = GgufTensor(stored.name, shape, path, data_start + offset, num_bytes)
    end, last = data_start, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start < end and tensor.num_bytes:
            raise ValueError(f"tensors {last} and {name} overlap")
        end, last = max(end, tensor.start + tensor.num_bytes), name
    return tensors
