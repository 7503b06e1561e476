"""JSON Lines: one JSON object per line (.jsonl, and .json files that do not hold an array)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paddlenlp_ext.data.readers.base import BLOCK_BYTES, READERS, Block, Cursor, FileReader
from paddlenlp_ext.data.readers.compression import COMPRESSIONS, open_bytes
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow
from paddlenlp_ext.utils.json_reader import SYNTAX, JsonError, Location, decode_utf8, read_value, skip_space

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class LinesBlock(Block):
    """Consecutive lines of a file, which are parsed by `rows`."""

    file: str
    first_line: int
    content: bytes

    def rows(self) -> Iterator[SourceRow | InvalidRow]:
        """Yield a `SourceRow` or an `InvalidRow` for every line that is not blank."""
        if self.content.isspace():
            return
        for line, raw in enumerate(self.content.split(b"\n"), start=self.first_line):
            if raw.strip():
                yield _read_line(Location(self.file, line, 1), raw.rstrip(b"\r"))


@READERS.register("", ".jsonl")
class JsonLinesReader(FileReader):
    """Reader of JSON Lines and of files with an unknown suffix; a cursor is (byte, line)."""

    @property
    def is_json_text(self) -> bool:
        """True if the file is uncompressed."""
        return self.path.suffix not in COMPRESSIONS

    def blocks(self, start: Cursor = ()) -> Iterator[Block]:
        """Yield blocks of about 256 KB, starting at a cursor."""
        offset, line = start or (0, 1)
        with open_bytes(self.path) as stream:
            stream.skip(offset)
            while content := stream.read_lines(BLOCK_BYTES):
                text = content if offset else content.removeprefix(BYTE_ORDER_MARK)
                first_line = line
                offset, line = offset + len(content), line + content.count(b"\n")
                yield LinesBlock((offset, line), stream.fraction, self.name, first_line, text)


def _read_line(origin: Location, raw: bytes) -> SourceRow | InvalidRow:
    try:
        text = decode_utf8(raw)
        start = skip_space(text, 0)
        value, end = read_value(text, start, allow_nan=True)
        if (end := skip_space(text, end)) < len(text):
            raise JsonError("more text after the row", text, end)
    except JsonError as error:
        remedy = "; one JSON object per line is expected" if error.reason == SYNTAX else ""
        return InvalidRow(error.location(origin), error.reason, f"{error}{remedy}")
    return SourceRow(origin.after(text[:start]), value, text[start:])
