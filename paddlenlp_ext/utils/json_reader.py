"""Read JSON (RFC 8259) with errors that name file, line and column.

The `json` module of Python parses the values. This module finds the offset of nested values, and rejects duplicate
keys, integers of more than `MAX_DIGITS` digits, and, by default, NaN and infinities.

    text = decode_utf8(path.read_bytes())
    value, end = read_value(text, offset)      # raises JsonError
    Location(file, 1, 1).after(text[:offset])  # file:line:column of an offset
    locate(text, ("messages", 0, "role"))      # offset of a nested value
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_DIGITS = 300
"""Maximum number of digits of an integer; integers up to this length can be converted to float."""
SYNTAX, ENCODING, DUPLICATE, NUMBER = "broken JSON", "not UTF-8", "duplicate key", "number too long"
"""Values of `JsonError.reason`."""

_SPACE = re.compile(r"[ \t\r\n]*")
_NO_NAN = "JSON has no NaN or infinity; write a finite number"
_HINTS = (
    (re.compile(r"//|/\*"), "JSON has no comments; delete this one"),
    (re.compile(r"#"), "JSON has no comments that begin with #; delete this one"),
    (re.compile(r"'"), "JSON strings need double quotes"),
    (re.compile(r"(True|False)\b"), "write true or false in lower case"),
    (re.compile(r"(None|nil|undefined)\b"), "write null for a missing value"),
    (re.compile(r"[-+]?(NaN|nan|Infinity|inf)"), _NO_NAN),
    (re.compile(r"[-+]?\.\d|\+\d"), "a JSON number begins with a digit or with - and a digit, such as 0.5"),
    (re.compile(r"[A-Za-z_]"), "unknown word; put strings and keys in double quotes"),
)


IN_MEMORY = "<rows>"
"""File name that messages show for rows passed in memory, followed by the index of the row from 0."""


@dataclass(frozen=True)
class Location:
    """Line and column in a file, counted from 1.

    A location without a column is the entire line, and a location without a line is the entire file.
    """

    file: str | None = None
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        if self.file == IN_MEMORY and self.line is not None:
            return f"row {self.line}"
        return ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)

    def after(self, text: str) -> Location:
        """Return the end location of `text`, which begins at this location."""
        if not text:
            return self
        assert self.line is not None and self.column is not None
        newlines = text.count("\n")
        if not newlines:
            return Location(self.file, self.line, self.column + len(text))
        return Location(self.file, self.line + newlines, len(text) - text.rfind("\n"))


class JsonError(ValueError):
    """Error about text that cannot be read as JSON.

    Attributes:
        text: the text.
        offset: position of the error in the text, counted in characters from 0.
        reason: SYNTAX, ENCODING, DUPLICATE or NUMBER.
        end: offset after the rejected value if the value is valid JSON (DUPLICATE, NUMBER), otherwise None.
    """

    def __init__(self, message: str, text: str, offset: int, reason: str = SYNTAX, end: int | None = None) -> None:
        super().__init__(message)
        self.text, self.offset, self.reason, self.end = text, offset, reason, end

    def location(self, origin: Location) -> Location:
        """Return the location of the error in a text that begins at `origin`."""
        return origin.after(self.text[: self.offset])


class _RefusedError(Exception):
    """Error of a decoder hook, where the offset is unknown; `read_value` converts it to `JsonError` with the offset."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def decode_utf8(data: bytes) -> str:
    """Decode the UTF-8 bytes of a file or a line.

    Raises:
        JsonError: the bytes are not UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8")
        message = f"byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise JsonError(message, before, len(before), ENCODING) from None


def read_value(text: str, offset: int = 0, *, allow_nan: bool = False) -> tuple[Any, int]:
    """Return the value that begins at `offset`, and the offset after the value.

    Raises:
        JsonError: the text is not JSON, an object has a duplicate key, an integer has more than `MAX_DIGITS` digits, or
            NaN or an infinity occurs although `allow_nan` is false.
    """
    if offset == len(text):
        raise expected("a value", text, offset)
    try:
        return _decode(_DECODERS[allow_nan], text, offset)
    except _RefusedError as error:
        end = None if error.reason == SYNTAX else _decode(_LENIENT_DECODER, text, offset)[1]
        raise JsonError(str(error), text, offset, error.reason, end) from None


def read_document(text: str) -> Any:
    """Return the only value of a text. NaN and infinities are accepted, because many programs write them.

    Raises:
        JsonError: see `read_value`; or text follows the value.
    """
    value, end = read_value(text, skip_space(text, 0), allow_nan=True)
    if (end := skip_space(text, end)) < len(text):
        raise JsonError("more text after the value", text, end)
    return value


def _decode(decoder: json.JSONDecoder, text: str, offset: int) -> tuple[Any, int]:
    try:
        return decoder.raw_decode(text, offset)
    except json.JSONDecodeError as error:
        if error.msg == "Expecting value":
            raise expected("a value", text, error.pos) from None
        message = error.msg[0].lower() + error.msg[1:]
        if "escape" in error.msg:
            message = r"a backslash begins an escape sequence; in paths, write / or \\"
        raise JsonError(message, text, error.pos) from None
    except RecursionError:
        raise JsonError("lists and objects are nested too deeply", text, offset) from None


def expected(what: str, text: str, offset: int) -> JsonError:
    """Return an error that says that `what` is expected at `offset`, or that points out a common mistake."""
    if offset >= len(text):
        return JsonError(f"the text ends where {what} should be", text, offset)
    for pattern, hint in _HINTS:
        if pattern.match(text, offset):
            return JsonError(hint, text, offset)
    return JsonError(f"expected {what}, found {text[offset]!r}", text, offset)


def skip_space(text: str, offset: int) -> int:
    """Return the offset of the first non-space character at or after `offset`."""
    match = _SPACE.match(text, offset)
    assert match is not None
    return match.end()


def locate(text: str, path: Sequence[str | int], start: int = 0) -> int:
    """Return the offset of the value at `path`; if the value is missing, the offset of its innermost existing ancestor.

    Args:
        text: valid JSON.
        path: keys of objects and indices of arrays, outermost first.
        start: offset of the outermost value.
    """
    start = skip_space(text, start)
    if not path:
        return start
    step, rest = path[0], path[1:]
    child = _member(text, start, step) if isinstance(step, str) else _element(text, start, step)
    return start if child is None else locate(text, rest, child)


def _member(text: str, start: int, key: str) -> int | None:
    if text[start] != "{":
        return None
    offset = skip_space(text, start + 1)
    while text[offset] != "}":
        name, offset = _LENIENT_DECODER.raw_decode(text, offset)
        offset = skip_space(text, skip_space(text, offset) + 1)
        if name == key:
            return offset
        offset = _next_item(text, offset)
    return None


def _element(text: str, start: int, index: int) -> int | None:
    if text[start] != "[":
        return None
    offset = skip_space(text, start + 1)
    while text[offset] != "]":
        if index == 0:
            return offset
        index -= 1
        offset = _next_item(text, offset)
    return None


def _next_item(text: str, offset: int) -> int:
    """Return the offset after the value at `offset` and an optional comma."""
    _, offset = _LENIENT_DECODER.raw_decode(text, offset)
    offset = skip_space(text, offset)
    return skip_space(text, offset + 1) if text[offset] == "," else offset


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise _RefusedError(DUPLICATE, f"duplicate key {twice!r} in one object; keep one")
    return members


def _whole_number(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _RefusedError(NUMBER, f"a whole number of {len(digits)} digits; use at most {MAX_DIGITS}")
    return int(digits)


def _refuse_constant(_name: str) -> NoReturn:
    raise _RefusedError(SYNTAX, _NO_NAN)


_DECODERS = {
    True: json.JSONDecoder(object_pairs_hook=_unique_keys, parse_int=_whole_number),
    False: json.JSONDecoder(object_pairs_hook=_unique_keys, parse_int=_whole_number, parse_constant=_refuse_constant),
}
_LENIENT_DECODER = json.JSONDecoder(parse_int=float)
"""Decoder that accepts duplicate keys and long integers, to find the end of a value that `_DECODERS` reject."""
