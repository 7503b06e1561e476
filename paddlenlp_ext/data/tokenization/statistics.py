"""Statistics of a tokenized split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paddlenlp_ext.data.rows.errors import MAX_LISTED
from paddlenlp_ext.data.rows.source_row import InvalidRow
from paddlenlp_ext.utils.json_reader import Location
from paddlenlp_ext.utils.logging import get_logger

_STORED_KEYS = {
    "num_untruncated": "num_kept",
    "num_target_tokens": "num_learned",
    "num_truncated_tokens": "num_tokens_cut",
}
"""Attribute of `DataStats` -> key in account.json, for attributes that are stored under another name."""


@dataclass
class DataStats:
    """Statistics of a tokenized split; num_read = num_untruncated + num_truncated + num_dropped.

    Attributes:
        num_read: number of rows in the data files, including invalid rows.
        num_untruncated: number of rows in the dataset that were not truncated.
        num_truncated: number of rows in the dataset that were truncated.
        dropped: reason -> number of dropped rows.
        num_tokens: number of tokens in the dataset.
        num_target_tokens: number of tokens in the dataset that contribute to the loss.
        num_truncated_tokens: number of tokens that truncation removed from rows in the dataset.
        num_lost_target_tokens: number of target tokens that truncation removed or that were in dropped rows; None in
            caches of earlier versions, which did not count them.
        num_unfolded: number of rows with several examples, because the template rewrites earlier turns.
        num_unfolded_examples: number of examples of the unfolded rows.
        num_split: number of plain texts that were split into several examples, because they exceed `max_length`.
        num_split_examples: number of examples of the split texts.
        num_thoughts: number of target answers with reasoning.
        num_tool_calls: number of tool calls in target answers.
        num_empty_thoughts: number of target answers that follow an empty reasoning block; the loss excludes the block.
        examples: the first dropped rows, for the log.
        unknown_fields: file -> field -> number of rows, for fields that have no effect and are not metadata.
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
        return sum(self.dropped.values())

    @property
    def lost_target_share(self) -> float:
        """Fraction of target tokens lost to truncation and dropped rows; 0 if lost tokens were not counted."""
        lost = self.num_lost_target_tokens or 0
        return lost / max(1, self.num_target_tokens + lost)

    def drop(self, problems: Sequence[InvalidRow], max_examples: int = 20) -> None:
        """Count dropped rows, and add them to `examples`, which holds at most `max_examples` rows."""
        self.dropped = dict(Counter(self.dropped) + Counter(problem.reason for problem in problems))
        self.examples = (*self.examples, *problems)[:max_examples]

    def add(self, other: DataStats) -> None:
        """Add the statistics of later rows; `examples` holds at most `MAX_LISTED` rows."""
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
        """Assert that num_read = num_untruncated + num_truncated + num_dropped."""
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
            ("target answers with reasoning", self.num_thoughts),
            ("target tool calls", self.num_tool_calls),
            ("targets after empty reasoning", self.num_empty_thoughts),
        )
        lines += [line for line in others if line[1]]
        width = max(len(name) for name, _ in lines)
        digits = max(len(f"{count:,}") for _, count in lines)
        return "\n".join([title, *(f"  {name:<{width}}  {count:>{digits},}" for name, count in lines)])

    def describe_unknown_fields(self) -> list[str]:
        """Return a log line for each file with unknown fields."""
        return [
            f"{file}: fields without effect: {_list_counts(counts)}" for file, counts in self.unknown_fields.items()
        ]

    def log(self, title: str) -> None:
        """Log the statistics, the first dropped rows, and the fields without effect."""
        get_logger().info("%s", self.table(title))
        for problem in self.examples:
            get_logger().warning("dropped: %s", problem)
        for line in self.describe_unknown_fields():
            get_logger().info("%s", line)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values for account.json; the keys stay compatible with caches of earlier versions."""
        values = asdict(self)
        for name, key in _STORED_KEYS.items():
            values[key] = values.pop(name)
        for row in values["examples"]:
            row["place"] = row.pop("location")
            del row["num_target_tokens"]
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> DataStats:
        """Return the statistics from the JSON values that `to_json` wrote."""
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
