"""Findings of an audit: what was found, where, and the remedy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from paddlenlp_ext.utils.json_reader import Location

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)
MAX_PLACES = 50
"""Maximum number of places that are listed of a check in a split; further ones are only counted."""
HIT = ("⟦", "⟧")
"""Marks around the offending part of an excerpt."""
_CONTEXT = 32
_LONGEST_HIT = 60


@dataclass(frozen=True)
class Kind:
    """Kind of finding.

    Attributes:
        name: name of the check.
        severity: "error": training on the row does harm, or the row is lost; "warning": the row is probably not meant
            so; "note": it may be meant so.
        remedy: advice for the user.
    """

    name: str
    severity: str
    remedy: str

    def __post_init__(self) -> None:
        assert self.severity in SEVERITIES, self.severity


@dataclass(frozen=True)
class Finding:
    """Place in the data at which a check found something."""

    location: Location
    excerpt: str


@dataclass
class Findings:
    """Findings of a split, by kind: the first `MAX_PLACES` places of each, and the number of all.

    Attributes:
        places: kind -> its first places, in reading order.
        counts: kind -> number of its findings.
    """

    places: dict[Kind, list[Finding]] = field(default_factory=dict)
    counts: Counter[Kind] = field(default_factory=Counter)

    def add(self, kind: Kind, finding: Finding) -> None:
        """Count a finding, and list it if there is room."""
        self.counts[kind] += 1
        listed = self.places.setdefault(kind, [])
        if len(listed) < MAX_PLACES:
            listed.append(finding)

    def merge(self, other: Findings) -> None:
        """Add the findings of rows that follow."""
        for kind, places in other.places.items():
            listed = self.places.setdefault(kind, [])
            listed += places[: MAX_PLACES - len(listed)]
        self.counts += other.counts

    def by_severity(self) -> list[Kind]:
        """Return the kinds that were found, the severest and then the most frequent first."""
        return sorted(self.counts, key=lambda kind: (SEVERITIES.index(kind.severity), -self.counts[kind], kind.name))

    def count(self, severity: str) -> int:
        """Return the number of findings of a severity."""
        return sum(number for kind, number in self.counts.items() if kind.severity == severity)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the findings as plain values for JSON."""
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
    """Return the surroundings of a part of a text in one line, with marks around the part if `end` is given."""
    if end is None:
        return printable(text[start : start + 2 * _CONTEXT]) + ("…" if len(text) > start + 2 * _CONTEXT else "")
    end = min(end, start + _LONGEST_HIT)
    first, last = max(0, start - _CONTEXT), end + _CONTEXT
    before = ("…" if first else "") + printable(text[first:start])
    return before + HIT[0] + printable(text[start:end]) + HIT[1] + printable(text[end:last]) + "…" * (last < len(text))


def printable(text: str) -> str:
    """Return a text in one line, with escapes in place of characters that cannot be seen."""
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character == "\n":
        return "⏎"
    return character if character.isprintable() else f"\\u{ord(character):04x}"
