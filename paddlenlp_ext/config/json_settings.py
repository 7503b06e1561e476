"""Read the settings of a flat JSON configuration file: `key: value` pairs with their locations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddlenlp_ext.config.errors import Problem
from paddlenlp_ext.utils.json_reader import (
    ENCODING,
    JsonError,
    Location,
    decode_utf8,
    expected,
    read_value,
    skip_space,
)


@dataclass(frozen=True)
class Setting:
    """Pair `key: value` as the user wrote it, with the locations of key and value."""

    key: str
    value: Any
    location: Location
    value_location: Location

    @property
    def from_command_line(self) -> bool:
        """Return whether the setting is a command-line argument."""
        return self.location.file is None


def read_file(path: str) -> tuple[list[Setting], list[Problem]]:
    """Return the settings of a file up to the first syntax error, and the problems found in the file."""
    if not Path(path).is_file():
        what = "is a folder, not a JSON file" if Path(path).is_dir() else "no such file"
        return [], [Problem("", what, Location(path))]
    try:
        text = decode_utf8(Path(path).read_bytes())
    except JsonError as error:
        return [], [_problem(error, path)]
    return read_text(text, path)


def read_text(text: str, path: str) -> tuple[list[Setting], list[Problem]]:
    """Return the settings of a JSON text, and the problems: duplicate keys, and the first syntax error."""
    settings: list[Setting] = []
    problems: list[Problem] = []
    try:
        _read_object(text, Location(path, 1, 1), settings)
    except JsonError as error:
        problems.append(_problem(error, path))
    first: dict[str, Setting] = {}
    for setting in settings:
        earlier = first.setdefault(setting.key, setting)
        if earlier is not setting:
            message = f"{setting.key!r} is written twice, first in line {earlier.location.line}; keep one"
            problems.append(Problem(setting.key, message, setting.location))
    return list(first.values()), problems


def _problem(error: JsonError, path: str) -> Problem:
    prefix = "" if error.reason == ENCODING else "not valid JSON: "
    return Problem("", f"{prefix}{error}", error.location(Location(path, 1, 1)))


def _read_object(text: str, origin: Location, settings: list[Setting]) -> None:
    if text.startswith("\ufeff"):
        raise JsonError("the file begins with a byte order mark; save it as UTF-8 without one", text, 0)
    at = skip_space(text, 0)
    if at == len(text):
        raise JsonError('the file is empty; write one object, {"key": value, ...}', text, at)
    if text[at] != "{":
        if text[at] in '["-0123456789' or text.startswith(("true", "false", "null"), at):
            raise JsonError('the file must contain one object, {"key": value, ...}', text, at)
        raise expected("'{'", text, at)
    at = skip_space(text, at + 1)
    while not text.startswith("}", at):
        at = _read_pair(text, at, origin, settings)
        if text.startswith(",", at):
            comma, at = at, skip_space(text, at + 1)
            if text.startswith("}", at):
                raise JsonError("a comma before '}'; delete it", text, comma)
        elif not text.startswith("}", at):
            raise expected("',' or '}'", text, at)
    at = skip_space(text, at + 1)
    if at != len(text):
        raise JsonError("more text after the closing '}'", text, at)


def _read_pair(text: str, at: int, origin: Location, settings: list[Setting]) -> int:
    """Append the pair `"key": value` at offset `at` to `settings`, and return the offset after the pair."""
    if not text.startswith('"', at):
        raise expected("a key in double quotes", text, at)
    location = origin.after(text[:at])
    key, at = read_value(text, at)
    at = skip_space(text, at)
    if not text.startswith(":", at):
        raise expected(f"':' after the key {key!r}", text, at)
    at = skip_space(text, at + 1)
    value, end = read_value(text, at)
    settings.append(Setting(key, value, location, origin.after(text[:at])))
    return skip_space(text, end)
