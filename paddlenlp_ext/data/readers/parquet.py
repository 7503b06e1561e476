"""Parquet files, read with pyarrow (the extra `parquet`)."""

from __future__ import annotations

from collections.abc import Iterator

from paddlenlp_ext.data.readers.base import BLOCK_ROWS, READERS, Block, Cursor, FileReader, ParsedBlock, column_rows
from paddlenlp_ext.utils.optional_packages import import_extra


@READERS.register(".parquet")
class ParquetReader(FileReader):
    """Reader of a Parquet file; a cursor is the number of rows before it.

    The row number is the line of a location. Null values are left out of rows.
    """

    may_be_compressed = False

    def blocks(self, start: Cursor = ()) -> Iterator[Block]:
        """Yield blocks, starting at a cursor; row groups before the cursor are not read."""
        parquet = import_extra("pyarrow.parquet", "parquet", self.name)
        (row,) = start or (0,)
        try:
            file = parquet.ParquetFile(self.path)
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
            raise ValueError(f"{self.path}: not a Parquet file, or damaged ({error}); restore the file") from error
        with file:
            num_rows, first = file.metadata.num_rows, 0
            groups = []
            for group in range(file.num_row_groups):
                end = first + file.metadata.row_group(group).num_rows
                if end > row:
                    groups.append((group, max(row - first, 0)))
                first = end
            for group, skipped in groups:
                for batch in file.iter_batches(batch_size=BLOCK_ROWS, row_groups=[group]):
                    used = batch.slice(min(skipped, len(batch)))
                    skipped -= len(batch) - len(used)
                    if len(used):
                        rows = column_rows(self.name, row, used.to_pylist())
                        row += len(rows)
                        yield ParsedBlock((row,), row / num_rows, rows)
