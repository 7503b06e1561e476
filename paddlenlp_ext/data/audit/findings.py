"""Findings of an audit: kind, location, excerpt and remedy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from paddlenlp_ext.utils.json_reader import Location

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)
MAX_PLACES = 50
"""Maximum number of findings that are listed per check and split; further findings are only counted."""
HIT = ("⟦", "⟧")
"""Marks around the match in an excerpt."""
_CONTEXT = 32
_LONGEST_HIT = 60


@dataclass(frozen=True)
class Kind:
    """Kind of finding.

    Attributes:
        name: name of the check.
        severity: "error": training on the row harms the model, or the row is lost; "warning": the row probably has a
            mistake; "note": the row may be intended.
        remedy: advice for the user.
    """

    name: str
    severity: str
    remedy: str

    def __post_init__(self) -> None:
        assert self.severity in SEVERITIES, self.severity


@dataclass(frozen=True)
class Finding:
    """Location and excerpt of a finding."""

    location: Location
    excerpt: str


@dataclass
class Findings:
    """Findings of a split by kind; the first `MAX_PLACES` findings per kind are listed, all are counted.

    Attributes:
        places: kind -> first findings, in reading order.
        counts: kind -> number of findings.
    """

    places: dict[Kind, list[Finding]] = field(default_factory=dict)
    counts: Counter[Kind] = field(default_factory=Counter)

    def add(self, kind: Kind, finding: Finding) -> None:
        """Count a finding, and list the finding if fewer than `MAX_PLACES` are listed."""
        self.counts[kind] += 1
        listed = self.places.setdefault(kind, [])
        if len(listed) < MAX_PLACES:
            listed.append(finding)

    def merge(self, other: Findings) -> None:
        """Add the findings of later rows to these findings."""
        for kind, places in other.places.items():
            listed = self.places.setdefault(kind, [])
            listed += places[: MAX_PLACES - len(listed)]
        self.counts += other.counts

    def by_severity(self) -> list[Kind]:
        """Return the kinds of findings, sorted by severity and then by count."""
        return sorted(self.counts, key=lambda kind: (SEVERITIES.index(kind.severity), -self.counts[kind], kind.name))

    def count(self, severity: str) -> int:
        return sum(number for kind, number in self.counts.items() if kind.severity == severity)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the findings as JSON-serializable values."""
        return [
            {
                "check": kind.name,
                "severity": kind.severity,
                "count": self.counts[kind],
                "remedy": kind.remedy,
                "places": [{"place": str(each.location), "excerpt": each.excerpt} for each in self.places[kind]],
            }
            for kind in self.by_severity()
        ]


def excerpt(text: str, start: int = 0, end: int | None = None) -> str:
    """Return an excerpt of a text on one line.

    Args:
        text: the text.
        start: start of the excerpt, or of the span to mark.
        end: end of the span to mark; the excerpt includes text around the span. None: no span is marked.
    """
    if end is None:
        return printable(text[start : start + 2 * _CONTEXT]) + ("…" if len(text) > start + 2 * _CONTEXT else "")
    end = min(end, start + _LONGEST_HIT)
    first, last = max(0, start - _CONTEXT), end + _CONTEXT
    before = ("…" if first else "") + printable(text[first:start])
    return before + HIT[0] + printable(text[start:end]) + HIT[1] + printable(text[end:last]) + "…" * (last < len(text))


def printable(text: str) -> str:
    """Return a text as one line, with invisible characters escaped."""
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character == "\n":
        return "⏎"
    return character if character.isprintable() else f"\\u{ord(character):04x}"
