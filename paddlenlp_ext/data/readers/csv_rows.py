"""CSV files (.csv): comma-separated values in UTF-8, with the names of the columns in the first line (RFC 4180)."""

from __future__ import annotations

import csv
from collections.abc import Iterator

from paddlenlp_ext.data.readers.base import BLOCK_ROWS, READERS, Block, Cursor, FileReader, ParsedBlock
from paddlenlp_ext.data.readers.compression import MAX_ROW_BYTES, ByteStream, open_bytes
from paddlenlp_ext.data.readers.json_lines import BYTE_ORDER_MARK
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow
from paddlenlp_ext.utils.json_reader import Location

_READ_BYTES = 1 << 16
RAGGED = "ragged line"
"""Reason for dropping a row with more or fewer values than columns."""


@READERS.register(".csv")
class CsvReader(FileReader):
    """Reader of a CSV file; a cursor is (byte, line). Empty values are left out of rows."""

    def blocks(self, start: Cursor = ()) -> Iterator[Block]:
        """Yield blocks, starting at a cursor.

        Raises:
            ValueError: a column has no name, or two columns have the same name.
        """
        csv.field_size_limit(MAX_ROW_BYTES)
        with open_bytes(self.path) as stream:
            lines = _Lines(stream, 0, 1)
            columns = next(csv.reader(lines), [])
        if not all(columns) or len(set(columns)) < len(columns):
            raise ValueError(
                f"{self.path}:1: the columns are {', '.join(map(repr, columns))}; the first line must name each column "
                "once"
            )
        with open_bytes(self.path) as stream:
            lines = _Lines(stream, *(start or (lines.byte, lines.line)))
            rows: list[SourceRow | InvalidRow] = []
            for row in self._rows(lines, columns):
                rows.append(row)
                if len(rows) == BLOCK_ROWS:
                    yield ParsedBlock((lines.byte, lines.line), stream.fraction, tuple(rows))
                    rows = []
            if rows:
                yield ParsedBlock((lines.byte, lines.line), 1.0, tuple(rows))

    def _rows(self, lines: _Lines, columns: list[str]) -> Iterator[SourceRow | InvalidRow]:
        """Yield a `SourceRow` or an `InvalidRow` for every row that is not blank."""
        parsed = csv.reader(lines, strict=True)
        while True:
            location = Location(self.name, lines.line, 1)
            try:
                values = next(parsed, None)
            except csv.Error as error:
                yield InvalidRow(location, "broken CSV", f"{error}; quote the value, and double the quotes in it")
                continue
            if values is None:
                return
            if len(values) == len(columns):
                fields = {name: value for name, value in zip(columns, values, strict=True) if value}
                yield SourceRow(location, fields)
            elif values:
                problem = f"{len(values)} values for the {len(columns)} columns {', '.join(columns)}"
                yield InvalidRow(location, RAGGED, f"{problem}; quote values that contain a comma")


class _Lines:
    """Iterator over the lines of a CSV file that counts the returned bytes and lines.

    Bytes that are not UTF-8 become lone surrogates, which make a row invalid.

    Attributes:
        byte: offset of the next line in the uncompressed file.
        line: number of the next line, from 1.
    """

    def __init__(self, stream: ByteStream, byte: int, line: int) -> None:
        stream.skip(byte)
        self.byte, self.line = byte, line
        self._lines = self._split(stream)

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        content = next(self._lines)
        text = content if self.byte else content.removeprefix(BYTE_ORDER_MARK)
        self.byte, self.line = self.byte + len(content), self.line + 1
        return text.decode("utf-8", "surrogateescape")

    @staticmethod
    def _split(stream: ByteStream) -> Iterator[bytes]:
        while content := stream.read_lines(_READ_BYTES):
            yield from content.splitlines(keepends=True)
