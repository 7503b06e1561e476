"""Find the files of a dataset and read their rows.

A dataset is a directory or the name of a built-in dataset. The directory holds `train.json` and `dev.json` (or
`.jsonl`), or directories `train/` and `dev/` of such files. A file holds one JSON object per line; a `.json` file may
hold one JSON array instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from paddlenlp_ext.data.types import InvalidRow, SourceRow
from paddlenlp_ext.utils.json_reader import (
    SYNTAX,
    JsonError,
    Location,
    decode_utf8,
    locate,
    read_value,
    skip_space,
)
from paddlenlp_ext.utils.registry import did_you_mean

SPLITS = ("train", "dev")
SUFFIXES = (".json", ".jsonl")
ADVERTISE_GEN = "AdvertiseGen"
"""Name of a dataset that is read from a folder of the user: it is not distributed with the package."""


def find_files(dataset_name_or_path: str, split: str, builtin_names: tuple[str, ...] = ()) -> list[Path]:
    """Return the files of one split, in the order of their names; a file is a dev split of its own.

    Raises:
        ValueError: the directory does not exist, lacks the split, or holds it twice.
    """
    assert split in SPLITS, split
    folder = _find_folder(dataset_name_or_path)
    if split == "dev" and folder.is_file() and folder.suffix in SUFFIXES:
        return [folder]
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else "is neither a directory nor a built-in dataset"
        known = f"; built in: {', '.join(builtin_names)}" if builtin_names else ""
        raise ValueError(
            f"dataset_name_or_path: {dataset_name_or_path!r} {what}{did_you_mean(dataset_name_or_path, builtin_names)} "
            f"Use a directory with train.json and dev.json (one JSON object per line){known}"
        )
    single = [folder / f"{split}{suffix}" for suffix in SUFFIXES]
    present = [path for path in single if path.is_file()]
    many = sorted(path for path in (folder / split).glob("*") if path.suffix in SUFFIXES and path.is_file())
    if len(present) + bool(many) > 1:
        named = ", ".join(str(path) for path in [*present, *many[:1]])
        raise ValueError(f"{folder}: the split {split!r} exists more than once: {named}; keep one")
    if not present and not many:
        looked_for = ", ".join(str(path) for path in [*single, *(folder / split / f"*{s}" for s in SUFFIXES)])
        raise ValueError(f"{folder}: no {split!r} split; add one of {looked_for}")
    return present or many


def _find_folder(dataset_name_or_path: str) -> Path:
    """Return the path of a dataset's directory, which may not exist.

    `AdvertiseGen` is also looked for where PaddleNLP downloads it: `$PPNLP_HOME/datasets`, by default
    `~/.paddlenlp/datasets`.

    Raises:
        ValueError: `AdvertiseGen` is in neither place.
    """
    folder = Path(dataset_name_or_path).expanduser()
    if dataset_name_or_path != ADVERTISE_GEN or folder.is_dir():
        return folder
    home = os.environ.get("PPNLP_HOME") or Path.home() / ".paddlenlp"
    downloaded = Path(home).expanduser() / "datasets" / ADVERTISE_GEN
    if not downloaded.is_dir():
        raise ValueError(
            f"dataset_name_or_path: {ADVERTISE_GEN} is not distributed with the package, and neither "
            f"{folder.absolute()} nor {downloaded} exists; docs/data.md says where to get it"
        )
    return downloaded


def read_rows(path: Path) -> Iterator[SourceRow | InvalidRow]:
    """Yield every row of a file, or an `InvalidRow` where one cannot be read; blank lines are not rows."""
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if path.suffix == ".json" and content.lstrip()[:1] == b"[":
        yield from _read_array(str(path), content)
    else:
        yield from _read_lines(str(path), content)


def location_of(row: SourceRow, path: tuple[str | int, ...]) -> Location:
    """Return the location of the part of a row at `path`."""
    if not row.text:
        return row.location
    return row.location.after(row.text[: locate(row.text, path)])


def _read_lines(file: str, content: bytes) -> Iterator[SourceRow | InvalidRow]:
    for line, raw in enumerate(content.split(b"\n"), start=1):
        if raw.strip():
            yield _read_line(Location(file, line, 1), raw.rstrip(b"\r"))


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


def _read_array(file: str, content: bytes) -> Iterator[SourceRow | InvalidRow]:
    """Yield the elements of a JSON array; a syntax error is fatal, because no later element can be found."""
    origin = Location(file, 1, 1)
    try:
        text = decode_utf8(content)
    except JsonError as error:
        yield _fatal(error, origin)
        return
    reached, location = 0, origin
    offset = skip_space(text, text.index("[") + 1)
    while text[offset : offset + 1] != "]":
        location, reached = location.after(text[reached:offset]), offset
        try:
            value, end = read_value(text, offset, allow_nan=True)
            yield SourceRow(location, value, text[offset:end])
        except JsonError as error:
            if error.end is None:
                yield _fatal(error, origin)
                return
            yield InvalidRow(location, error.reason, str(error))
            end = error.end
        offset = skip_space(text, end)
        if text[offset : offset + 1] == ",":
            offset = skip_space(text, offset + 1)
        elif text[offset : offset + 1] != "]":
            yield _fatal(JsonError("a comma or the closing bracket of the array is expected", text, offset), origin)
            return
    if (rest := skip_space(text, offset + 1)) < len(text):
        yield _fatal(JsonError("more text after the array", text, rest), origin)


def _fatal(error: JsonError, origin: Location) -> InvalidRow:
    return InvalidRow(error.location(origin), error.reason, f"{error}; the rest of the file cannot be read", fatal=True)
