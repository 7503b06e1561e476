"""A flat JSON file as a list of settings that remember their line and column.

The grammar is RFC 8259, read by the standard library value by value; this file adds the positions and refuses what
the library would let pass (NaN, a key written twice).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddlenlp_ext.config.errors import Location, Problem

MAX_DIGITS = 100
"""Longer whole numbers are refused: nobody means them, and they fit no float."""
_SPACE = re.compile(r"[ \t\n\r]*")
_HINTS = (
    (re.compile(r"//|#|/\*"), "JSON has no comments; delete this one"),
    (re.compile(r"'"), "JSON strings stand in double quotes"),
    (re.compile(r"(True|False)\b"), "JSON writes true and false in lower case"),
    (re.compile(r"(None|nil|undefined)\b"), "JSON writes null for a value that is not set"),
    (re.compile(r"[-+]?(NaN|nan|Infinity|inf)"), "JSON has no NaN and no infinity; write a finite number"),
    (re.compile(r"[-+]?\.\d|\+\d"), "a JSON number begins with a digit or with - and a digit, as in 0.5"),
    (re.compile(r"[A-Za-z_]"), "a word that JSON does not know; put strings and keys in double quotes"),
)


@dataclass(frozen=True)
class Setting:
    """One `key: value` as written. `place` is where the key stands, `value_place` where the value does."""

    key: str
    value: Any
    place: Location
    value_place: Location

    @property
    def from_command_line(self) -> bool:
        return self.place.file is None


class _FaultError(ValueError):
    """The text stops being JSON at `offset`."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


def read_file(path: str, order: int) -> tuple[list[Setting], list[Problem]]:
    """The settings of a file up to its first fault, and what is wrong with the file itself."""
    here = Location(path, order=order)
    if not Path(path).is_file():
        what = "is a folder, not a JSON file" if Path(path).is_dir() else "no such file"
        return [], [Problem("", what, here)]
    data = Path(path).read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8")
        message = f"not UTF-8: byte 0x{data[error.start]:02x}; save the file as UTF-8"
        return [], [Problem("", message, _place(here, before, len(before)))]
    return read_text(text, here)


def read_text(text: str, here: Location) -> tuple[list[Setting], list[Problem]]:
    """The settings of a text, and the duplicates and the first fault in it."""
    settings: list[Setting] = []
    problems: list[Problem] = []
    try:
        _read_object(text, here, settings)
    except _FaultError as fault:
        problems.append(Problem("", f"not valid JSON: {fault}", _place(here, text, fault.offset)))
    first: dict[str, Setting] = {}
    for setting in settings:
        earlier = first.setdefault(setting.key, setting)
        if earlier is not setting:
            message = f"{setting.key!r} is written twice, first in line {earlier.place.line}; keep one"
            problems.append(Problem(setting.key, message, setting.place))
    return list(first.values()), problems


def _read_object(text: str, here: Location, settings: list[Setting]) -> None:
    if text.startswith("\ufeff"):
        raise _FaultError("the file begins with a byte order mark; save it as UTF-8 without one", 0)
    at = _skip(text, 0)
    if at == len(text):
        raise _FaultError('the file is empty; it should hold an object, {"key": value, ...}', at)
    if text[at] != "{":
        if text[at] in '["-0123456789' or text.startswith(("true", "false", "null"), at):
            raise _FaultError('the file should hold one object, {"key": value, ...}', at)
        raise _expected(text, at, "'{'")
    at = _skip(text, at + 1)
    while not text.startswith("}", at):
        at = _read_pair(text, at, here, settings)
        if text.startswith(",", at):
            comma, at = at, _skip(text, at + 1)
            if text.startswith("}", at):
                raise _FaultError("a comma before '}'; delete it", comma)
        elif not text.startswith("}", at):
            raise _expected(text, at, "',' or '}'")
    at = _skip(text, at + 1)
    if at != len(text):
        raise _FaultError("more text after the closing '}'", at)


def _read_pair(text: str, at: int, here: Location, settings: list[Setting]) -> int:
    """Read `"key": value`, append it, and return the offset of what follows."""
    if not text.startswith('"', at):
        raise _expected(text, at, "a key in double quotes")
    key_at = at
    key, at = _decode(text, at)
    at = _skip(text, at)
    if not text.startswith(":", at):
        raise _expected(text, at, f"':' after the key {key!r}")
    value_at = _skip(text, at + 1)
    value, at = _decode(text, value_at)
    settings.append(Setting(key, value, _place(here, text, key_at), _place(here, text, value_at)))
    return _skip(text, at)


def _decode(text: str, at: int) -> tuple[Any, int]:
    def refuse_constant(_name: str) -> None:
        raise _FaultError(_HINTS[4][1], at)

    def parse_int(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise _FaultError(f"a number of {len(digits)} digits", at)
        return int(digits)

    if at == len(text):
        raise _expected(text, at, "a value")
    try:
        return json.JSONDecoder(parse_constant=refuse_constant, parse_int=parse_int).raw_decode(text, at)
    except json.JSONDecodeError as error:
        if error.msg == "Expecting value":
            raise _expected(text, error.pos, "a value") from None
        if "escape" in error.msg:
            hint = r"in a string a backslash begins an escape: write / in paths, or \\"
            raise _FaultError(hint, error.pos) from None
        raise _FaultError(error.msg[0].lower() + error.msg[1:], error.pos) from None
    except RecursionError:
        raise _FaultError("lists nested too deeply", at) from None


def _expected(text: str, at: int, what: str) -> _FaultError:
    """A fault that says what should stand here, and what a user probably meant."""
    if at >= len(text):
        return _FaultError(f"the file ends where {what} should stand", at)
    for pattern, hint in _HINTS:
        if pattern.match(text, at):
            return _FaultError(hint, at)
    return _FaultError(f"{what} should stand here, not {text[at]!r}", at)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _place(here: Location, text: str, offset: int) -> Location:
    line_start = text.rfind("\n", 0, offset) + 1
    return Location(here.file, text.count("\n", 0, offset) + 1, offset - line_start + 1, order=here.order)
