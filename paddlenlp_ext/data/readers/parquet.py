"""Parquet files, read with pyarrow (the extra `parquet`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paddlenlp_ext.data.readers.base import BLOCK_ROWS, READERS, Block, Cursor, FileReader
from paddlenlp_ext.data.readers.column_batches import column_blocks
from paddlenlp_ext.utils.optional_packages import import_extra

_MAX_GROUP_BYTES = 1 << 32
_MAX_GROUP_VALUES = 1 << 28
_BATCH_BYTES = 1 << 26
"""Limit on the average size of a decoded batch, in bytes."""
_REMEDY = "restore the file, or write it with smaller row groups (row_group_size)"


@READERS.register(".parquet")
class ParquetReader(FileReader):
    """Reader of a Parquet file; a cursor is the index of the next row.

    The line of a location is the row number. Null values are left out of rows.
    """

    may_be_compressed = False

    def blocks(self, start: Cursor = ()) -> Iterator[Block]:
        """Yield blocks, starting at a cursor; row groups before the cursor are not read."""
        parquet = import_extra("pyarrow.parquet", "parquet", self.name)
        # A footer with damaged column names raises KeyError or UnicodeDecodeError.
        damaged = (OSError, import_extra("pyarrow", "parquet", self.name).ArrowException, KeyError, UnicodeDecodeError)
        (row,) = start or (0,)
        try:
            footer = parquet.read_metadata(self.path)
            texts = _text_columns(self.path, footer)
            with parquet.ParquetFile(self.path, read_dictionary=texts, pre_buffer=False) as file:
                yield from column_blocks(_batches(file, row), self.name, row, footer.num_rows)
        except damaged as error:
            raise ValueError(f"{self.path}: not a Parquet file, or damaged ({error}); restore the file") from error


def _text_columns(path: Path, footer: Any) -> list[str]:
    """Return the paths of the string columns, which are read as indices into a dictionary.

    Raises:
        ValueError: a row group expands to too many bytes or values, according to the footer.
    """
    texts: dict[str, None] = {}
    for index in range(footer.num_row_groups):
        group = footer.row_group(index)
        columns = [group.column(column) for column in range(group.num_columns)]
        num_bytes = max(group.total_byte_size, sum(column.total_uncompressed_size for column in columns))
        if num_bytes > _MAX_GROUP_BYTES:
            raise ValueError(
                f"{path}: row group {index} expands to {num_bytes / 2**30:.1f} GiB; the "
                f"maximum is {_MAX_GROUP_BYTES >> 30} GiB; {_REMEDY}"
            )
        for column in columns:
            if column.num_values > _MAX_GROUP_VALUES:
                raise ValueError(
                    f"{path}: row group {index} has {column.num_values:,} values of {column.path_in_schema}; the "
                    f"maximum is {_MAX_GROUP_VALUES:,}; {_REMEDY}"
                )
            if column.physical_type == "BYTE_ARRAY":
                texts[column.path_in_schema] = None
    return list(texts)


def _batches(file: Any, row: int) -> Iterator[Any]:
    first = 0
    for index in range(file.num_row_groups):
        group = file.metadata.row_group(index)
        skipped, first = max(row - first, 0), first + group.num_rows
        if skipped >= group.num_rows:
            continue
        size = min(BLOCK_ROWS, max(1, _BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1)))
        for batch in file.iter_batches(batch_size=size, row_groups=[index]):
            used = batch.slice(min(skipped, len(batch)))
            skipped -= len(batch) - len(used)
            yield used
