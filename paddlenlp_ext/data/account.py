"""What became of every row that was read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paddlenlp_ext.data.rows import BadRow, Place


@dataclass
class DataAccount:
    """Rows read = rows kept whole + rows truncated + rows dropped, the dropped ones by reason.

    Attributes:
        num_read: rows found in the source, broken ones included.
        num_kept: rows that are in the dataset whole.
        num_truncated: rows that are in the dataset with something cut off.
        dropped: reason -> number of rows that are not in the dataset.
        num_tokens: tokens in the dataset; `num_learned` of them are learned.
        num_tokens_cut: tokens that truncation took away (those of dropped rows are not counted).
        examples: the first bad rows, for the log.
    """

    num_read: int = 0
    num_kept: int = 0
    num_truncated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    num_tokens: int = 0
    num_learned: int = 0
    num_tokens_cut: int = 0
    examples: tuple[BadRow, ...] = ()

    @property
    def num_dropped(self) -> int:
        """Rows that are not in the dataset, over all reasons."""
        return sum(self.dropped.values())

    def drop(self, problems: Sequence[BadRow], max_examples: int = 20) -> None:
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
        lines += [("tokens", self.num_tokens), ("tokens learned", self.num_learned)]
        if self.num_tokens_cut:
            lines.append(("tokens cut off", self.num_tokens_cut))
        width = max(len(name) for name, _ in lines)
        digits = max(len(f"{count:,}") for _, count in lines)
        return "\n".join([title, *(f"  {name:<{width}}  {count:>{digits},}" for name, count in lines)])

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> DataAccount:
        """The inverse of `to_json`."""
        rows = tuple(BadRow(**{**row, "place": Place(**row["place"])}) for row in values["examples"])
        return cls(**{**values, "examples": rows})
