"""Valid and invalid rows of data files, with their locations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.utils.json_reader import Location, locate


@dataclass(frozen=True)
class SourceRow:
    """Row of a data file.

    Attributes:
        location: location of the row.
        value: JSON value of the row.
        text: JSON text of the row, which `location_of` searches; empty if the file is not JSON.
    """

    location: Location
    value: Any
    text: str = ""


@dataclass(frozen=True)
class InvalidRow:
    """Row that does not become training data.

    Attributes:
        location: file, line and column of the error.
        reason: short category of the error; the statistics count dropped rows by reason.
        message: description of the error and its remedy.
        by_policy: whether the row is valid but excluded by an option (`truncation: drop`).
        fatal: whether the rest of the file cannot be read.
        num_target_tokens: number of target tokens of the row; 0 if the row was not tokenized.
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
    """Return the location of the value at `path` in a row, or of the row if its text is unknown."""
    if not row.text:
        return row.location
    return row.location.after(row.text[: locate(row.text, path)])
