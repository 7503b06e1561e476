"""Results of an audit, and their conversion to JSON and to text for the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.data.audit.block_auditor import AuditedRows
from paddlenlp_ext.data.audit.findings import ERROR, NOTE, SEVERITIES, WARNING, Findings

_MAX_LOGGED = 3
_EXCERPT_WIDTH = 72
_BAR_BINS = 40


@dataclass
class SplitReport:
    """Audit results of a split.

    Attributes:
        name: "train", or "dev" with the name of the dev set.
        files: names of the data files.
        rows: counts and findings.
        is_sample: whether only the first rows of each file were read.
    """

    name: str
    files: tuple[str, ...]
    rows: AuditedRows
    is_sample: bool = False

    @property
    def target_share(self) -> float:
        """Fraction of target tokens among all tokens."""
        return self.rows.stats.num_target_tokens / max(1, self.rows.stats.num_tokens)

    def length_bins(self, max_length: int) -> tuple[int, list[int]]:
        """Return the bin width and the bins of a histogram of example lengths.

        The bins cover lengths up to twice `max_length`; the last bin includes all longer examples.
        """
        longest = min(max(self.rows.lengths, default=1), 2 * max_length)
        width = max(1, -(-longest // _BAR_BINS))
        bins = [0] * (longest // width + 1)
        for length, count in self.rows.lengths.items():
            bins[min(length // width, len(bins) - 1)] += count
        return width, bins

    def percentile(self, fraction: float) -> int:
        """Return a quantile of the example lengths, in tokens before truncation; 0 if there are no examples."""
        seen, total = 0, self.rows.num_examples
        for length in sorted(self.rows.lengths):
            seen += self.rows.lengths[length]
            if seen >= fraction * total:
                return length
        return 0

    def to_json(self) -> dict[str, Any]:
        """Return the results as JSON-serializable values."""
        stats = {name: value for name, value in self.rows.stats.to_json().items() if name != "examples"}
        return {
            "split": self.name,
            "files": list(self.files),
            "is_sample": self.is_sample,
            "account": stats,
            "num_examples": self.rows.num_examples,
            "target_share": self.target_share,
            "lengths": {name: self.percentile(share) for name, share in PERCENTILES.items()},
            "target_shares": self.rows.target_shares.tolist(),
            "languages": dict(self.rows.languages.most_common()),
            "findings": self.rows.findings.to_json(),
        }


PERCENTILES = {"median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}


@dataclass
class AuditReport:
    """Audit results of all splits of a run.

    Attributes:
        title: names of the datasets.
        max_length: maximum length of an example in tokens.
        splits: results of the splits, training rows first.
        seconds: duration of the audit.
        num_compared: number of rows that the duplicate search compared.
    """

    title: str
    max_length: int
    splits: list[SplitReport]
    seconds: float
    num_compared: int

    @property
    def num_rows(self) -> int:
        return sum(split.rows.stats.num_read for split in self.splits)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all examples."""
        return sum(split.rows.stats.num_tokens for split in self.splits)

    def count(self, severity: str) -> int:
        return sum(split.rows.findings.count(severity) for split in self.splits)

    @property
    def summary(self) -> str:
        """Text with the number of findings per severity."""
        counts = [f"{self.count(name):,} {name}{'s' * (self.count(name) != 1)}" for name in SEVERITIES]
        return ", ".join(counts)

    def to_json(self) -> dict[str, Any]:
        """Return the results as JSON-serializable values."""
        return {
            "title": self.title,
            "seconds": round(self.seconds, 3),
            "num_rows": self.num_rows,
            "num_compared": self.num_compared,
            "errors": self.count(ERROR),
            "warnings": self.count(WARNING),
            "notes": self.count(NOTE),
            "splits": [split.to_json() for split in self.splits],
        }

    def table(self) -> str:
        """Return text for the log: the kinds of findings in each split, with the first locations of each kind."""
        speed = f"{self.num_rows / self.seconds:,.0f} rows/s, {self.num_tokens / self.seconds:,.0f} tokens/s"
        lines = [f"data audit of {self.num_rows:,} rows ({speed}): {self.summary}"]
        for split in self.splits:
            lines += [f"  {split.name}: {line}" for line in _finding_lines(split.rows.findings)]
        return "\n".join(lines)


def _finding_lines(findings: Findings) -> list[str]:
    lines = []
    for kind in findings.by_severity():
        lines.append(f"{kind.severity}: {kind.name} ({findings.counts[kind]:,}); {kind.remedy}")
        for place in findings.places[kind][:_MAX_LOGGED]:
            lines.append(f"    {place.location}: {place.excerpt[:_EXCERPT_WIDTH]}")
    return lines
