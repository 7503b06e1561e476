"""Files of a dataset, and the rows in them.

A dataset is a folder with `train.json` and `dev.json` (or `.jsonl`), or with folders `train/` and `dev/` of such
files, or the name of a built-in dataset. A file holds one JSON object a line; a `.json` file may hold one JSON array
instead.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from paddlenlp_ext.data.types import InvalidRow, InvalidRowError, Location, SourceRow
from paddlenlp_ext.utils.json_positions import locate
from paddlenlp_ext.utils.registry import did_you_mean

SPLITS = ("train", "dev")
SUFFIXES = (".json", ".jsonl")
BROKEN = "broken JSON"
MAX_DIGITS = sys.int_info.str_digits_check_threshold
"""Longer whole numbers are refused: Python may be set up to read none that are."""


def find_files(dataset_name_or_path: str, split: str, builtin_names: tuple[str, ...] = ()) -> list[Path]:
    """The files of one split, in order.

    Raises:
        ValueError: there is no such folder, or none of the files looked for is in it.
    """
    assert split in SPLITS, split
    folder = Path(dataset_name_or_path).expanduser()
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else "is neither a folder nor a built-in dataset"
        known = f" Built in: {', '.join(builtin_names)}." if builtin_names else ""
        raise ValueError(
            f"dataset_name_or_path {dataset_name_or_path!r} {what}{did_you_mean(dataset_name_or_path, builtin_names)} "
            f"Give a folder that holds train.json and dev.json (one JSON object a line).{known}"
        )
    single = [folder / f"{split}{suffix}" for suffix in SUFFIXES]
    present = [path for path in single if path.is_file()]
    many = sorted(path for path in (folder / split).glob("*") if path.suffix in SUFFIXES and path.is_file())
    if len(present) + bool(many) > 1:
        named = ", ".join(str(path) for path in [*present, *many[:1]])
        raise ValueError(f"the split {split!r} is there more than once: {named}; keep one")
    if not present and not many:
        looked_for = ", ".join(str(path) for path in [*single, *(folder / split / f"*{s}" for s in SUFFIXES)])
        raise ValueError(f"no {split!r} split in {folder}: looked for {looked_for}")
    return present or many


def read_rows(path: Path) -> Iterator[SourceRow | InvalidRow]:
    """Every row of a file, broken ones as `InvalidRow`; blank lines are not rows."""
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if path.suffix == ".json" and content.lstrip()[:1] == b"[":
        yield from _read_array(str(path), content)
    else:
        yield from _read_lines(str(path), content)


def place_of(row: SourceRow, path: tuple[str | int, ...]) -> Location:
    """The file position of a part of a row."""
    if not row.text:
        return row.place
    return _advance(row.place, row.text[: locate(row.text, path)])


def _read_lines(file: str, content: bytes) -> Iterator[SourceRow | InvalidRow]:
    for line, raw in enumerate(content.split(b"\n"), start=1):
        if raw.strip():
            yield _read_line(file, line, raw.rstrip(b"\r"))


def _read_line(file: str, line: int, raw: bytes) -> SourceRow | InvalidRow:
    try:
        text = raw.decode("utf-8")
        value = _DECODER.decode(text)
    except UnicodeDecodeError as error:
        return _not_utf8(file, line, raw, error.start)
    except json.JSONDecodeError as error:
        return InvalidRow(Location(file, line, error.colno), BROKEN, f"{error.msg}; one JSON object a line is expected")
    except InvalidRowError as error:
        return InvalidRow(Location(file, line), error.reason, str(error))
    except RecursionError:
        return InvalidRow(Location(file, line), BROKEN, "nested too deeply")
    indent = len(text) - len(text.lstrip())
    return SourceRow(Location(file, line, indent + 1), value, text[indent:])


def _read_array(file: str, content: bytes) -> Iterator[SourceRow | InvalidRow]:
    """Elements of a JSON array, one by one. Behind a broken element nothing can be told apart: that is fatal."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line_start = content.rfind(b"\n", 0, error.start) + 1
        line = content.count(b"\n", 0, error.start) + 1
        yield replace(_not_utf8(file, line, content[line_start:], error.start - line_start), fatal=True)
        return
    origin = Location(file, 1, 1)
    reached, place = 0, origin
    position = _skip_space(text, text.index("[") + 1)
    while text[position : position + 1] != "]":
        place, reached = _advance(place, text[reached:position]), position
        try:
            row, end = _read_element(text, position, place)
        except json.JSONDecodeError as error:
            yield _break(_advance(origin, text[: error.pos]), error.msg)
            return
        except RecursionError:
            yield _break(place, "nested too deeply")
            return
        yield row
        position = _skip_space(text, end)
        if text[position : position + 1] == ",":
            position = _skip_space(text, position + 1)
        elif text[position : position + 1] != "]":
            yield _break(_advance(origin, text[:position]), "a comma or the closing bracket of the array is expected")
            return
    behind = _skip_space(text, position + 1)
    if behind < len(text):
        yield _break(_advance(origin, text[:behind]), "text behind the array")


def _read_element(text: str, position: int, place: Location) -> tuple[SourceRow | InvalidRow, int]:
    """The element that begins at `position`, and where it ends. One that is JSON but no row is passed over."""
    try:
        value, end = _DECODER.raw_decode(text, position)
    except InvalidRowError as error:
        _, end = _PASSING_DECODER.raw_decode(text, position)
        return InvalidRow(place, error.reason, str(error)), end
    return SourceRow(place, value, text[position:end]), end


def _break(place: Location, message: str) -> InvalidRow:
    return InvalidRow(place, BROKEN, f"{message}; the rest of the file cannot be read", fatal=True)


def _not_utf8(file: str, line: int, raw: bytes, offset: int) -> InvalidRow:
    column = len(raw[:offset].decode("utf-8")) + 1
    return InvalidRow(Location(file, line, column), "not UTF-8", f"byte 0x{raw[offset]:02x} begins no UTF-8 character")


def _advance(place: Location, text: str) -> Location:
    """The place reached behind `text`, which begins at `place`."""
    newlines = text.count("\n")
    if not newlines:
        return Location(place.file, place.line, place.column + len(text))
    return Location(place.file, place.line + newlines, len(text) - text.rfind("\n"))


def _skip_space(text: str, position: int) -> int:
    while text[position : position + 1] in (" ", "\t", "\r", "\n"):
        position += 1
    return position


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRowError(
            "key written twice", f"the key {twice!r} stands twice in one object; the first would be lost"
        )
    return members


def _whole_number(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise InvalidRowError("number too long", f"a whole number of {len(digits)} digits; {MAX_DIGITS} are read")
    return int(digits)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_int=_whole_number)
_PASSING_DECODER = json.JSONDecoder(parse_int=float)
"""Finds the end of what `_DECODER` refuses."""
