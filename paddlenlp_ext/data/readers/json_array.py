"""Read JSON files (.json): an array of rows, which is parsed incrementally, or JSON Lines."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Any

from paddlenlp_ext.data.readers.base import BLOCK_BYTES, READERS, Block, Cursor, ParsedBlock
from paddlenlp_ext.data.readers.compression import MAX_ROW_BYTES, ByteStream, open_bytes, row_too_long
from paddlenlp_ext.data.readers.json_lines import BYTE_ORDER_MARK, JsonLinesReader
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow
from paddlenlp_ext.utils.json_reader import ENCODING, JsonError, Location, decode_utf8, read_value, skip_space

_FIRST_BYTES = 1 << 12
_LONGEST_WORD = 16
"""Bound on the length of a JSON token other than a string. If a syntax error is within this distance of the end of the
text in memory, its cause may be a token that continues in the unread text."""


@READERS.register(".json")
class JsonReader(JsonLinesReader):
    """Reader of a JSON array or of JSON Lines; the cursor in an array is the (byte, line, column) of an element."""

    def blocks(self, start: Cursor = ()) -> Iterator[Block]:
        """Yield blocks, starting at a cursor. A syntax error in an array ends the rows with a fatal `InvalidRow`."""
        with open_bytes(self.path) as stream:
            is_array = _begins_array(stream)
        if not is_array:
            yield from super().blocks(start)
            return
        with open_bytes(self.path) as stream:
            text = _ArrayText(stream, self.name, start)
            rows: list[SourceRow | InvalidRow] = []
            first_byte, end = text.byte, text.cursor
            for row in text.rows(is_start=not start):
                rows.append(row)
                end = text.cursor
                if text.byte - first_byte >= BLOCK_BYTES:
                    yield ParsedBlock(end, stream.fraction, tuple(rows))
                    rows, first_byte = [], text.byte
            if rows:
                yield ParsedBlock(end, 1.0, tuple(rows))


def _begins_array(stream: ByteStream) -> bool:
    content = stream.read(_FIRST_BYTES).removeprefix(BYTE_ORDER_MARK)
    while content and content.isspace():
        content = stream.read(_FIRST_BYTES)
    return content.lstrip()[:1] == b"["


class _ArrayText:
    """Sliding window over the text of a JSON array.

    Attributes:
        text: text in memory.
        at: offset of the current position in `text`.
        location: location of the current position.
        byte: offset of the current position in the uncompressed file.
    """

    def __init__(self, stream: ByteStream, file: str, start: Cursor) -> None:
        self.byte, line, column = start or (0, 1, 1)
        stream.skip(self.byte)
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._is_complete = False
        self._encoding_error: str | None = None
        self.text, self.at, self.location = "", 0, Location(file, line, column)

    @property
    def cursor(self) -> Cursor:
        assert self.location.line is not None and self.location.column is not None
        return self.byte, self.location.line, self.location.column

    def rows(self, is_start: bool) -> Iterator[SourceRow | InvalidRow]:
        """Yield the elements of the array; `is_start` tells whether the position is before the opening bracket."""
        try:
            if is_start:
                self._enter()
            self._skip_space()
            while self._peek() != "]":
                row = self._element()
                problem = self._pass_separator()
                yield row
                if problem is not None:
                    raise problem
            self._advance(self.at + 1)
            self._skip_space()
            if self._peek():
                raise JsonError("more text after the array", self.text, self.at)
        except JsonError as error:
            location = self.location.after(self.text[self.at : error.offset])
            yield InvalidRow(location, error.reason, f"{error}; the rest of the file cannot be read", fatal=True)

    def _enter(self) -> None:
        while not self.text and self._grow():
            pass
        if self.text.startswith("\ufeff"):
            self.text, self.byte = self.text[1:], len(BYTE_ORDER_MARK)
        while "[" not in self.text and self._grow():
            pass
        self._advance(self.text.index("[") + 1)

    def _element(self) -> SourceRow | InvalidRow:
        location = self.location
        try:
            value, end = self._read_value()
            row: SourceRow | InvalidRow = SourceRow(location, value, self.text[self.at : end])
        except JsonError as error:
            if error.end is None:
                raise
            row, end = InvalidRow(location, error.reason, str(error)), error.end
        self._advance(end)
        return row

    def _read_value(self) -> tuple[Any, int]:
        """Return the value at the current position and its end; read more text while the value may continue."""
        while True:
            try:
                value, end = read_value(self.text, self.at, allow_nan=True)
                if end < len(self.text) or not self._grow():
                    return value, end
            except JsonError as error:
                is_open = str(error).startswith("unterminated string") or error.offset > len(self.text) - _LONGEST_WORD
                if error.end is not None or not is_open or not self._grow():
                    raise

    def _pass_separator(self) -> JsonError | None:
        """Move past a comma and whitespace; return an error if neither a comma nor the closing bracket follows."""
        try:
            self._skip_space()
            if self._peek() == ",":
                self._advance(self.at + 1)
                self._skip_space()
                return None
        except JsonError as error:
            return error
        if self._peek() == "]":
            return None
        return JsonError("a comma or the closing bracket of the array is expected", self.text, self.at)

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _skip_space(self) -> None:
        self._advance(skip_space(self.text, self.at))
        while self.at == len(self.text) and self._grow():
            self._advance(skip_space(self.text, self.at))

    def _advance(self, offset: int) -> None:
        passed = self.text[self.at : offset]
        self.location = self.location.after(passed)
        self.byte += len(passed.encode())
        self.at = offset

    def _grow(self) -> bool:
        """Discard the text before the position, and at least double the remaining text; return False at the file's end.

        Raises:
            JsonError: the next bytes are not UTF-8, or an element is too long.
        """
        if self._encoding_error is not None:
            raise JsonError(self._encoding_error, self.text, len(self.text), ENCODING)
        if self._is_complete:
            return False
        if len(self.text) - self.at > MAX_ROW_BYTES:
            raise JsonError(row_too_long(), self.text, self.at)
        content = self._stream.read(max(BLOCK_BYTES, len(self.text) - self.at))
        self._is_complete = not content
        try:
            piece = self._decoder.decode(content, final=self._is_complete)
        except UnicodeDecodeError as error:
            piece = self._decoded_part(error.object)
        if self._is_complete and self._encoding_error is None:
            return False
        self.text, self.at = self.text[self.at :] + piece, 0
        return True

    def _decoded_part(self, content: bytes) -> str:
        """Return the text before the first bytes that are not UTF-8, and store the encoding error."""
        try:
            return decode_utf8(content)
        except JsonError as error:
            self._encoding_error = str(error)
            return error.text
