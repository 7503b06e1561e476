"""What a row is before it is tokens: its place in a file, a conversation, or a reason why it is neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_LISTED = 20
"""How many bad rows one error spells out; the rest are counted."""


@dataclass(frozen=True)
class Place:
    """A position in a source: `file` as the user named it, line and column counted from one."""

    file: str
    line: int
    column: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class SourceRow:
    """A row as it was read: its JSON value, and the text it was read from so that parts can be found again."""

    place: Place
    value: Any
    text: str = ""


@dataclass(frozen=True)
class BadRow:
    """A row that is not learned from.

    `reason` is the account's short word, `message` says what is wrong. `by_policy`: nothing is wrong, an option said
    to leave such rows out. `fatal`: the rest of the file cannot be read, so leaving out this row alone is impossible.
    """

    place: Place
    reason: str
    message: str
    by_policy: bool = False
    fatal: bool = False

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}: {self.message}"


@dataclass(frozen=True)
class Conversation:
    """A system prompt, or None, and (user, assistant) turns in order."""

    system: str | None
    turns: tuple[tuple[str, str], ...]


class RowError(ValueError):
    """A row is not what its format says.

    Attributes:
        reason: the account's short word.
        path: keys and indices from the row to the part that is wrong.
        by_policy: an option said to leave such rows out.
    """

    def __init__(self, reason: str, message: str, path: Sequence[str | int] = (), *, by_policy: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.path = tuple(path)
        self.by_policy = by_policy


class DataError(ValueError):
    """Rows of a dataset are bad; `.problems` holds all of them, the message the first few and the total."""

    def __init__(self, problems: Sequence[BadRow]) -> None:
        self.problems = tuple(problems)
        listed = "\n".join(f"  {problem}" for problem in self.problems[:MAX_LISTED])
        rest = len(self.problems) - MAX_LISTED
        more = f"\n  ... and {rest} more" if rest > 0 else ""
        count = f"{len(self.problems)} bad row" + ("s" if len(self.problems) != 1 else "")
        remedy = 'Mend them, or set "bad_rows": "drop" to leave them out (they are counted).'
        if any(problem.fatal for problem in self.problems):
            remedy = (
                'Mend them. "bad_rows": "drop" does not pass over a break in a JSON array: all rows behind it would be '
                "lost. In a file of one JSON object a line, only the broken line is."
            )
        super().__init__(f"{count}:\n{listed}{more}\n{remedy}")
