"""What a run was given, while it is being checked: values, where they stand, and what was found wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paddlenlp_ext.config.errors import COMMAND_LINE_ORDER, Location, Problem
from paddlenlp_ext.config.json_reader import Setting
from paddlenlp_ext.config.keys import KnownKeys


@dataclass
class ParseState:
    """What was set, by key: the value that won and where it stands."""

    known: KnownKeys
    values: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Setting] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    home: Location = field(default_factory=lambda: Location(order=COMMAND_LINE_ORDER))
    """Where a problem about an absent key is reported: the last file, or the command line."""
    broken: set[str] = field(default_factory=set)
    """Keys whose value could not be read: no second problem is made of them."""

    def value(self, key: str) -> Any:
        """The value of a key, its default where it was not set."""
        return self.values[key] if key in self.values else self.known.options[key].default

    def place(self, *keys: str) -> Location:
        """Where the first of the keys that was set has its value."""
        places = [self.settings[key].value_place for key in keys if key in self.settings]
        return places[0] if places else self.home

    def refuse(self, message: str, *keys: str) -> None:
        """Record a problem about `keys`, located at the first of them that was set."""
        self.problems.append(Problem(keys[0], message, self.place(*keys)))
        self.broken.update(keys)

    def note(self, message: str, *keys: str) -> None:
        """Record what the user should know about `keys`."""
        places = [self.settings[key].place.short for key in keys if key in self.settings]
        self.notes.append(f"{message} ({places[0]})" if places else message)
