"""Keys of PaddleNLP's configuration files that are not implemented here, or only partly.

paddlenlp_keys.json lists the keys of PaddleNLP 2.7 to 3.0 in groups of entries. An entry describes one or more keys
(`keys`) by the attributes of `CompatKey`; `type` is bool, int, float, str or any, or null if a section declares the
keys.

Entries for keys that an adapter method declares are skipped. When a feature is implemented, delete its entries.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paddlenlp_ext.config.dataclass_options import Option, kinds_of

Outcome = Literal["not yet", "not here", "no effect"]


@dataclass(frozen=True)
class CompatKey:
    """Key of PaddleNLP or another toolkit that is not fully implemented here.

    Attributes:
        key: the key.
        neutral: values that change nothing; the first value is the default.
        reason: reason or remedy, at the end of the message.
        kind: type of the key (object: any value); None if a section declares the key.
        outcome: effect of a value that is not neutral: "not yet" and "not here" are errors, "no effect" is a note.
        needs: switch of the feature that the key belongs to; if the switch is on, only the switch is reported.
        sets: text of a value -> keys and values of this project with the same meaning (toolkit_keys.json).
    """

    key: str
    neutral: tuple[Any, ...]
    reason: str
    kind: Any = None
    outcome: Outcome = "not yet"
    needs: str | None = None
    sets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def translation(self, value: Any) -> Mapping[str, Any] | None:
        """Return the keys and values of this project with the same meaning as `value`; None if there are none."""
        return self.sets.get(value if isinstance(value, str) else json.dumps(value))

    def option(self) -> Option:
        """Return the option for a key that no section declares."""
        kinds, _ = kinds_of(self.kind)
        return Option(
            key=self.key,
            section=self.outcome,
            attribute=self.key,
            kinds=kinds,
            optional=None in self.neutral,
            default=self.neutral[0],
            help=self.reason,
        )

    def message(self, value: str) -> str:
        """Return the message for a value that is not neutral."""
        if self.outcome == "not yet":
            return f"{self.key}: {value} is not available yet ({self.reason})"
        if self.outcome == "not here":
            return f"{self.key}: {value} is not used here: {self.reason}"
        return f"{self.key} has no effect: {self.reason}"


_TYPES = {"bool": bool, "int": int, "float": float, "str": str, "bool or str": bool | str, "any": object, None: None}


def compat_keys(group: Iterable[Mapping[str, Any]]) -> Iterator[CompatKey]:
    """Yield the keys that the entries of a JSON file describe."""
    for entry in group:
        kind, rest = _TYPES[entry["type"]], {name: entry[name] for name in ("needs", "sets") if name in entry}
        for key in entry["keys"]:
            yield CompatKey(key, tuple(entry["neutral"]), entry["reason"], kind, entry["outcome"], **rest)


_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
SECTION_KEYS = tuple(compat_keys(_TABLE["keys of sections"]))
"""Entries about keys that a section declares."""
COMPAT_KEYS = tuple(entry for group in _TABLE.values() for entry in compat_keys(group))
"""All entries of the table."""
