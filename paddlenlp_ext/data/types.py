"""Records shared by the data modules: source rows, encoded rows, invalid rows, and statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from paddlenlp_ext.utils.json_reader import Location
from paddlenlp_ext.utils.labels import IGNORED_LABEL

_STORED_KEYS = {
    "num_untruncated": "num_kept",
    "num_target_tokens": "num_learned",
    "num_truncated_tokens": "num_tokens_cut",
}
"""Attributes of `DataStats` whose keys in account.json have other names."""
MAX_LISTED = 20
"""Maximum number of invalid rows that an error message lists; the others are only counted."""


@dataclass(frozen=True)
class SourceRow:
    """Row of a data file: its JSON value, and the source text of that value, in which `location_of` finds parts."""

    location: Location
    value: Any
    text: str = ""


@dataclass(frozen=True)
class InvalidRow:
    """Row that does not become training data.

    Attributes:
        location: file, line and column of the error.
        reason: short category, under which the statistics count the row.
        message: the error and its remedy.
        by_policy: the row is valid, but an option (`truncation: drop`) excludes it.
        fatal: the rest of the file cannot be read, so skipping only this row is impossible.
        num_target_tokens: target tokens that the row would have had; 0 if it was not tokenized.
    """

    location: Location
    reason: str
    message: str
    by_policy: bool = False
    fatal: bool = False
    num_target_tokens: int = 0

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}: {self.message}"


@dataclass(frozen=True)
class Document:
    """Positions that a row occupies next to each other in a batch.

    Attributes:
        input_ids: int [T].
        labels: int64 [T], the token that each position should predict, or -100 where no loss is computed.
        first_position: position id of the first token; the others follow without a gap.
        parent: index, among the documents of the row, of the document that this one continues: its tokens are visible
            too, as if they preceded this document. None: no other document is visible.
        answer: index, among the answers of the row, of the answer that the labels belong to; -1: none.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    first_position: int = 0
    parent: int | None = None
    answer: int = -1


@dataclass(frozen=True)
class EncodedRow:
    """Tokenized row.

    Attributes:
        tokens: int32 [L].
        loss_mask: bool [L], true for target tokens.
        row_index: number of the row in its dataset.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    row_index: int

    @property
    def length(self) -> int:
        """Number of positions that the row takes in a batch: one less than its tokens."""
        return len(self.tokens) - 1

    @property
    def documents(self) -> tuple[Document, ...]:
        """Documents of the row, in the order of their positions."""
        labels = np.where(self.loss_mask[1:], self.tokens[1:], IGNORED_LABEL)
        return (Document(self.tokens[:-1], labels),)

    @property
    def parts(self) -> list[tuple[str, np.ndarray, np.ndarray]]:
        """Name, tokens and loss mask of each part of the row, for a preview; a row in one part has no name."""
        return [("", self.tokens, self.loss_mask)]


class InvalidRowError(ValueError):
    """Row that violates its format or cannot be tokenized.

    Attributes:
        reason: short category, under which the statistics count the row.
        path: keys and indices that lead from the row to the invalid part.
        by_policy: the row is valid, but an option excludes it.
    """

    def __init__(self, reason: str, message: str, path: Sequence[str | int] = (), *, by_policy: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.path = tuple(path)
        self.by_policy = by_policy


class DataError(ValueError):
    """Invalid rows of a dataset: `problems` holds all of them, the message lists the first few and their number."""

    def __init__(self, problems: Sequence[InvalidRow]) -> None:
        self.problems = tuple(problems)
        listed = "\n".join(f"  {problem}" for problem in self.problems[:MAX_LISTED])
        rest = len(self.problems) - MAX_LISTED
        more = f"\n  ... and {rest} more" if rest > 0 else ""
        count = f"{len(self.problems)} invalid row" + ("s" if len(self.problems) != 1 else "")
        remedy = 'Fix them, or set "bad_rows": "drop" to skip them (they are counted).'
        if any(problem.fatal for problem in self.problems):
            remedy = (
                'Fix them; "bad_rows": "drop" cannot skip a syntax error in a JSON array: all rows after it would be '
                "lost. In a file with one JSON object per line, only the invalid line is skipped."
            )
        super().__init__(f"{count}:\n{listed}{more}\n{remedy}")


@dataclass
class DataStats:
    """Statistics of a tokenized split: rows read = untruncated rows + truncated rows + dropped rows.

    Attributes:
        num_read: rows in the data files, invalid ones included.
        num_untruncated: rows of the dataset that were not truncated.
        num_truncated: rows of the dataset that were truncated.
        dropped: reason -> number of rows that are not in the dataset.
        num_tokens: tokens in the dataset.
        num_target_tokens: tokens in the dataset that count in the loss.
        num_truncated_tokens: tokens that truncation removed, without those of dropped rows.
        num_lost_target_tokens: target tokens that truncation removed, and those of rows dropped because of their
            length; None in the cache of an earlier version, which did not count them.
        num_unfolded: rows that became several examples, because the template rewrites earlier turns.
        num_unfolded_examples: examples of those rows.
        num_split: plain texts that became several examples, because they are longer than `max_length`.
        num_split_examples: examples of those texts.
        num_thoughts: target answers with a thought.
        num_tool_calls: calls of tools in target answers.
        num_empty_thoughts: target answers after an empty thought, which is no target.
        examples: the first dropped rows, for the log.
        unknown_fields: file -> field -> number of rows with it, for fields that have no effect and are not metadata.
    """

    num_read: int = 0
    num_untruncated: int = 0
    num_truncated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    num_tokens: int = 0
    num_target_tokens: int = 0
    num_truncated_tokens: int = 0
    num_lost_target_tokens: int | None = 0
    num_unfolded: int = 0
    num_unfolded_examples: int = 0
    num_split: int = 0
    num_split_examples: int = 0
    num_thoughts: int = 0
    num_tool_calls: int = 0
    num_empty_thoughts: int = 0
    examples: tuple[InvalidRow, ...] = ()
    unknown_fields: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def num_dropped(self) -> int:
        """Number of rows that are not in the dataset, over all reasons."""
        return sum(self.dropped.values())

    @property
    def lost_target_share(self) -> float:
        """Fraction of target tokens that truncation removed or that dropped rows had; 0 if it was not counted."""
        lost = self.num_lost_target_tokens or 0
        return lost / max(1, self.num_target_tokens + lost)

    def drop(self, problems: Sequence[InvalidRow], max_examples: int = 20) -> None:
        """Count dropped rows, and store the first `max_examples` of all dropped rows as examples."""
        self.dropped = dict(Counter(self.dropped) + Counter(problem.reason for problem in problems))
        self.examples = (*self.examples, *problems)[:max_examples]

    def add(self, other: DataStats) -> None:
        """Add the counts of further rows, and their examples of dropped rows up to `MAX_LISTED`."""
        lost = (self.num_lost_target_tokens, other.num_lost_target_tokens)
        for name, value in vars(other).items():
            if isinstance(value, int) and name != "num_lost_target_tokens":
                setattr(self, name, getattr(self, name) + value)
        self.num_lost_target_tokens = None if None in lost else sum(count or 0 for count in lost)
        self.dropped = dict(Counter(self.dropped) + Counter(other.dropped))
        self.examples = (*self.examples, *other.examples)[:MAX_LISTED]
        for file, counts in other.unknown_fields.items():
            self.unknown_fields[file] = dict(Counter(self.unknown_fields.get(file, {})) + Counter(counts))

    def check(self) -> None:
        """Assert that every row was counted exactly once."""
        total = self.num_untruncated + self.num_truncated + self.num_dropped
        assert self.num_read == total, f"{self.num_read} rows read, but {total} counted: {self}"

    def table(self, title: str = "rows") -> str:
        """Return the statistics as aligned text for the log."""
        lines = [("read", self.num_read), ("kept in full", self.num_untruncated), ("truncated", self.num_truncated)]
        lines += [(f"dropped: {reason}", count) for reason, count in sorted(self.dropped.items())]
        lines += [("tokens", self.num_tokens), ("target tokens", self.num_target_tokens)]
        others = (
            ("tokens truncated", self.num_truncated_tokens),
            ("target tokens lost", self.num_lost_target_tokens or 0),
            ("rows unfolded", self.num_unfolded),
            ("examples of unfolded rows", self.num_unfolded_examples),
            ("texts split", self.num_split),
            ("examples of split texts", self.num_split_examples),
            ("target answers with a thought", self.num_thoughts),
            ("target tool calls", self.num_tool_calls),
            ("targets after an empty thought", self.num_empty_thoughts),
        )
        lines += [line for line in others if line[1]]
        width = max(len(name) for name, _ in lines)
        digits = max(len(f"{count:,}") for _, count in lines)
        return "\n".join([title, *(f"  {name:<{width}}  {count:>{digits},}" for name, count in lines)])

    def describe_unknown_fields(self) -> list[str]:
        """Return a line for each file that has unknown fields, for the log."""
        return [
            f"{file}: fields without effect: {_list_counts(counts)}" for file, counts in self.unknown_fields.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """Return plain values for account.json, under the keys that earlier versions wrote."""
        values = asdict(self)
        for name, key in _STORED_KEYS.items():
            values[key] = values.pop(name)
        for row in values["examples"]:
            row["place"] = row.pop("location")
            del row["num_target_tokens"]
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> DataStats:
        """Return the statistics from the values that `to_json` returned."""
        attributes = {key: name for name, key in _STORED_KEYS.items()}
        values = {"num_lost_target_tokens": None, **values}
        counts = {attributes.get(key, key): value for key, value in values.items() if key != "examples"}
        examples = tuple(
            InvalidRow(Location(**row["place"]), row["reason"], row["message"], row["by_policy"], row["fatal"])
            for row in values["examples"]
        )
        return cls(**counts, examples=examples)


def _list_counts(counts: dict[str, int]) -> str:
    names = sorted(counts, key=lambda name: (-counts[name], name))
    listed = [f"{name} ({counts[name]:,} row{'s' if counts[name] > 1 else ''})" for name in names[:MAX_LISTED]]
    return ", ".join(listed) + (f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else "")
