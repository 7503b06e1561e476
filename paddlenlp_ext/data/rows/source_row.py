"""Rows that readers yield, valid or invalid, with their location in the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.utils.json_reader import Location, locate


@dataclass(frozen=True)
class SourceRow:
    """Row of a data file: its location, its JSON value, and the text of the value, in which errors are located."""

    location: Location
    value: Any
    text: str = ""


@dataclass(frozen=True)
class InvalidRow:
    """Row that does not become training data.

    Attributes:
        location: file, line and column of the error.
        reason: short category; the statistics count dropped rows by it.
        message: the error and its remedy.
        by_policy: the row is valid, but an option (`truncation: drop`) excludes it.
        fatal: the rest of the file cannot be read, so the row cannot be skipped alone.
        num_target_tokens: number of target tokens that are lost with the row; 0 if it was not tokenized.
    """

    location: Location
    reason: str
    message: str
    by_policy: bool = False
    fatal: bool = False
    num_target_tokens: int = 0

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}: {self.message}"


def location_of(row: SourceRow, path: tuple[str | int, ...]) -> Location:
    """Return the location of the value at `path` in a row."""
    if not row.text:
        return row.location
    return row.location.after(row.text[: locate(row.text, path)])
