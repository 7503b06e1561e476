"""Compute the decompressed size of the compressed buffers of an Arrow stream, without decompressing the buffers.

A message of the stream has metadata in FlatBuffers format, with the positions of its buffers
(https://arrow.apache.org/docs/format/Columnar.html). A compressed buffer begins with its size after decompression,
int64; -1: not compressed.
"""

from __future__ import annotations

import struct
from typing import Any

from paddlenlp_ext.utils.optional_packages import import_extra

_HEADER_TYPE, _HEADER = 1, 2
"""Fields of `Message`."""
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
"""Values of `_HEADER_TYPE`."""
_DATA = 1
"""Field of `DictionaryBatch` whose value is a `RecordBatch`."""
_BUFFERS, _COMPRESSION = 2, 3
"""Fields of `RecordBatch`."""


def expanded_bytes(message: Any) -> int:
    """Return the total decompressed size of the compressed buffers of a message, in bytes.

    Args:
        message: `pyarrow.ipc.Message`.

    Raises:
        pyarrow.ArrowInvalid: the metadata is damaged.
    """
    try:
        return sum(_sizes(memoryview(message.metadata), message.body))
    except (struct.error, IndexError) as error:
        invalid = import_extra("pyarrow", "parquet", "arrow_buffers").ArrowInvalid
        raise invalid(f"the metadata of a message is damaged ({error})") from None


def _sizes(metadata: memoryview, body: Any) -> list[int]:
    root = _follow(metadata, 0)
    kind, header = _field(metadata, root, _HEADER_TYPE), _field(metadata, root, _HEADER)
    if kind is None or header is None or metadata[kind] not in (_DICTIONARY_BATCH, _RECORD_BATCH):
        return []
    batch = _follow(metadata, header)
    if metadata[kind] == _DICTIONARY_BATCH:
        data = _field(metadata, batch, _DATA)
        if data is None:
            return []
        batch = _follow(metadata, data)
    buffers = _field(metadata, batch, _BUFFERS)
    if buffers is None or _field(metadata, batch, _COMPRESSION) is None:
        return []
    first = _follow(metadata, buffers)
    (count,) = struct.unpack_from("<I", metadata, first)
    content, sizes = memoryview(body), []
    for index in range(count):
        offset, length = struct.unpack_from("<qq", metadata, first + 4 + 16 * index)
        if length:
            sizes.append(max(0, struct.unpack_from("<q", content, offset)[0]))
    return sizes


def _follow(data: memoryview, position: int) -> int:
    """Return the position that the offset at `position` refers to."""
    return position + struct.unpack_from("<I", data, position)[0]


def _field(data: memoryview, table: int, index: int) -> int | None:
    """Return the position of a field of a table; None if the table lacks the field."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    (size,) = struct.unpack_from("<H", data, fields)
    entry = 4 + 2 * index
    offset = struct.unpack_from("<H", data, fields + entry)[0] if entry < size else 0
    return table + offset if offset else None
