"""`Setting`: a pair `key: value` of a configuration file or of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.utils.json_reader import Location

SCHEMA_KEY = "$schema"
"""Optional key of every configuration: the path of a JSON schema for editors. The key does not change the run."""


@dataclass(frozen=True)
class Setting:
    """Pair `key: value` as the user wrote it, with the locations of key and value."""

    key: str
    value: Any
    location: Location
    value_location: Location

    @property
    def from_command_line(self) -> bool:
        """Return whether the setting is a command-line argument."""
        return self.location.file is None
