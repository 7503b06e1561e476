"""Convert batches of Arrow columns to rows without exhausting memory.

A few kilobytes of a Parquet or Arrow file can expand to terabytes of text, because rows refer to the strings of a
dictionary by index. Strings therefore stay encoded as indices until the size of the rows is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from paddlenlp_ext.data.readers.base import BLOCK_ROWS, ParsedBlock, column_rows
from paddlenlp_ext.data.readers.compression import MAX_ROW_BYTES, row_too_long
from paddlenlp_ext.utils.optional_packages import import_extra

_ITEM_BYTES = 8
"""Approximate size of a number, a null value or an item of a list, in bytes."""


def column_blocks(batches: Iterable[Any], name: str, row: int, num_rows: int) -> Iterator[ParsedBlock]:
    """Yield the rows of record batches in blocks of at most `BLOCK_ROWS` rows and `MAX_ROW_BYTES`.

    Args:
        batches: `pyarrow.RecordBatch` items; the first begins at row `row`.
        name: name of the file in locations and errors.
        row: number of rows of the file before the first batch.
        num_rows: number of rows of the file.

    Raises:
        ValueError: a row is larger than `MAX_ROW_BYTES`, or a string is not UTF-8.
    """
    for batch in batches:
        for start in range(0, len(batch), BLOCK_ROWS):
            for part in _split(batch.slice(start, BLOCK_ROWS), name, row):
                try:
                    rows = column_rows(name, row, part.to_pylist())
                except UnicodeDecodeError as error:
                    place = f"{name}: rows {row + 1} to {row + len(part)}"
                    raise ValueError(
                        f"{place}: text that is not UTF-8 ({error.reason}); write the file again with valid UTF-8"
                    ) from None
                row += len(rows)
                yield ParsedBlock((row,), min(1.0, row / max(num_rows, 1)), rows)


def _split(batch: Any, name: str, row: int) -> Iterator[Any]:
    """Yield consecutive slices of a batch of at most `MAX_ROW_BYTES` each."""
    if sum(map(_num_bytes, batch.columns)) <= MAX_ROW_BYTES:
        yield batch
    elif len(batch) == 1:
        raise ValueError(f"{name}:{row + 1}: {row_too_long()}")
    else:
        half = len(batch) // 2
        yield from _split(batch.slice(0, half), name, row)
        yield from _split(batch.slice(half), name, row + half)


def _num_bytes(array: Any) -> int:
    """Return the approximate size of an array's values as Python objects, in bytes."""
    compute = import_extra("pyarrow.compute", "parquet", "column_batches")
    types = import_extra("pyarrow", "parquet", "column_batches").types
    kind = array.type
    if types.is_dictionary(kind):
        sizes = _lengths(array.dictionary, compute, types)
        return len(array) * _ITEM_BYTES + (0 if sizes is None else compute.sum(sizes.take(array.indices)).as_py() or 0)
    if types.is_nested(kind) and not types.is_union(kind):
        children = array.flatten() if types.is_struct(kind) else [array.flatten()]
        return len(array) * _ITEM_BYTES + sum(map(_num_bytes, children))
    sizes = _lengths(array, compute, types)
    return len(array) * _ITEM_BYTES + (0 if sizes is None else compute.sum(sizes).as_py() or 0)


def _lengths(array: Any, compute: Any, types: Any) -> Any:
    """Return the lengths of strings in bytes, as int64; None for other types."""
    kind = array.type
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    is_bytes = types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
    return compute.binary_length(array).cast("int64") if is_text or is_bytes else None
