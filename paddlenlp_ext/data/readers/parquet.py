"""Parquet files, read with pyarrow (the extra `parquet`)."""

from __future__ import annotations

from collections.abc import Iterator

from paddlenlp_ext.data.readers.base import BLOCK_ROWS, READERS, Block, Cursor, FileReader, ParsedBlock
from paddlenlp_ext.data.rows.source_row import SourceRow
from paddlenlp_ext.utils.json_reader import Location
from paddlenlp_ext.utils.optional_packages import import_extra


@READERS.register(".parquet")
class ParquetReader(FileReader):
    """Reader of a Parquet file; a cursor is the number of rows before it, and the line of a location is the row number.

    A column that is null in a row is left out of the row.
    """

    may_be_compressed = False

    def blocks(self, start: Cursor = ()) -> Iterator[Block]:
        """Yield blocks, starting at a cursor; row groups before it are not read."""
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
                        rows = tuple(self._row(row + index, value) for index, value in enumerate(used.to_pylist()))
                        row += len(rows)
                        yield ParsedBlock((row,), row / num_rows, rows)

    def _row(self, index: int, value: dict[str, object]) -> SourceRow:
        fields = {name: part for name, part in value.items() if part is not None}
        return SourceRow(Location(self.name, index + 1, 1), fields)
