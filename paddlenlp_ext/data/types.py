"""What became of every row that was read.

What a row is before it is tokens: its place in a file, a conversation, or a reason why it is neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from paddlenlp_ext.utils.json_reader import Location

MAX_LISTED = 20
"""How many bad rows one error spells out; the rest are counted."""


@dataclass(frozen=True)
class SourceRow:
    """A row as it was read: its JSON value, and the text it was read from so that parts can be found again."""

    location: Location
    value: Any
    text: str = ""


@dataclass(frozen=True)
class InvalidRow:
    """A row that is not learned from.

    `reason` is the account's short word, `message` says what is wrong. `by_policy`: nothing is wrong, an option said
    to leave such rows out. `fatal`: the rest of the file cannot be read, so leaving out this row alone is impossible.
    """

    location: Location
    reason: str
    message: str
    by_policy: bool = False
    fatal: bool = False

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}: {self.message}"


@dataclass(frozen=True)
class Conversation:
    """A system prompt, or None, and (user, assistant) turns in order."""

    system: str | None
    turns: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class EncodedRow:
    """One tokenized row: `tokens` int32 [L], `learned` bool [L] (is this token to be predicted), its number."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    row_index: int

    @property
    def length(self) -> int:
        """Slots the row takes in a batch: one less than its tokens."""
        return len(self.tokens) - 1


class InvalidRowError(ValueError):
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

    def __init__(self, problems: Sequence[InvalidRow]) -> None:
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


@dataclass
class DataStats:
    """Rows read = rows kept whole + rows truncated + rows dropped, the dropped ones by reason.

    Attributes:
        num_read: rows found in the source, broken ones included.
        num_kept: rows that are in the dataset whole.
        num_truncated: rows that are in the dataset with something cut off.
        dropped: reason -> number of rows that are not in the dataset.
        num_tokens: tokens in the dataset; `num_target_tokens` of them are learned.
        num_tokens_cut: tokens that truncation took away (those of dropped rows are not counted).
        examples: the first bad rows, for the log.
    """

    num_read: int = 0
    num_kept: int = 0
    num_truncated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    num_tokens: int = 0
    num_target_tokens: int = 0
    num_tokens_cut: int = 0
    examples: tuple[InvalidRow, ...] = ()

    @property
    def num_dropped(self) -> int:
        """Rows that are not in the dataset, over all reasons."""
        return sum(self.dropped.values())

    def drop(self, problems: Sequence[InvalidRow], max_examples: int = 20) -> None:
        """Enter rows that are left out."""
        self.dropped = dict(Counter(self.dropped) + Counter(problem.reason for problem in problems))
        self.examples = (*self.examples, *problems)[:max_examples]

    def check(self) -> None:
        """Assert that no row was lost or counted twice."""
        total = self.num_kept + self.num_truncated + self.num_dropped
        assert self.num_read == total, f"{self.num_read} rows read, but {total} accounted for: {self}"

    def table(self, title: str = "rows") -> str:
        """The account as aligned text for the log."""
        lines = [("read", self.num_read), ("kept whole", self.num_kept), ("truncated", self.num_truncated)]
        lines += [(f"dropped: {reason}", count) for reason, count in sorted(self.dropped.items())]
        lines += [("tokens", self.num_tokens), ("tokens learned", self.num_target_tokens)]
        if self.num_tokens_cut:
            lines.append(("tokens cut off", self.num_tokens_cut))
        width = max(len(name) for name, _ in lines)
        digits = max(len(f"{count:,}") for _, count in lines)
        return "\n".join([title, *(f"  {name:<{width}}  {count:>{digits},}" for name, count in lines)])

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file; its keys are those of the first token caches."""
        values = asdict(self)
        values["num_learned"] = values.pop("num_target_tokens")
        for row in values["examples"]:
            row["place"] = row.pop("location")
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> DataStats:
        """Return the account that `to_json` gave `values` for."""
        counts = {name: value for name, value in values.items() if name not in ("num_learned", "examples")}
        examples = tuple(
            InvalidRow(Location(**row["place"]), row["reason"], row["message"], row["by_policy"], row["fatal"])
            for row in values["examples"]
        )
        return cls(**counts, num_target_tokens=values["num_learned"], examples=examples)
