"""Collect the problems of a configuration with their locations, and raise one error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from paddlenlp_ext.utils.json_reader import Location


@dataclass(frozen=True)
class ArgumentLocation(Location):
    """Location of a command-line argument; `file` is None."""

    argument: str = ""
    index: int = 0

    def __str__(self) -> str:
        return f"command line: {self.argument}" if self.argument else "command line"


@dataclass(frozen=True)
class Problem:
    """Problem in a configuration; `key` is the name or alias of the key at fault, or "" if there is none."""

    key: str
    message: str
    location: Location

    @property
    def file(self) -> str | None:
        """Return the path of the file as the user wrote it; None for the command line."""
        return self.location.file

    @property
    def line(self) -> int | None:
        """Return the line number, counted from 1."""
        return self.location.line

    @property
    def column(self) -> int | None:
        """Return the column number, counted from 1."""
        return self.location.column

    def __str__(self) -> str:
        location = str(self.location)
        return f"{location}: {self.message}" if location else self.message


class ConfigError(ValueError):
    """Error that lists all problems of a configuration, ordered by file and location; the command line comes last.

    Args:
        problems: at least one problem.
        files: the files in the order in which they were read.
        subject: subject of the message, such as "the arguments".
    """

    def __init__(
        self, problems: Iterable[Problem], files: Sequence[str] = (), subject: str = "the configuration"
    ) -> None:
        order = {file: index for index, file in reversed(list(enumerate(files)))}

        def position(problem: Problem) -> tuple[int, int, int]:
            location = problem.location
            if isinstance(location, ArgumentLocation):
                return (len(order), location.index, 0)
            return (order.get(location.file or "", len(order)), location.line or 0, location.column or 0)

        self.problems = sorted(problems, key=position)
        assert self.problems
        count = len(self.problems)
        title = f"1 problem in {subject}:" if count == 1 else f"{count} problems in {subject}:"
        lines = [f"  {number}. {problem}" for number, problem in enumerate(self.problems, start=1)]
        super().__init__("\n".join([title, *lines]))


def _never_set(_key: str) -> Location | None:
    return None


@dataclass
class Report:
    """Problems and notes about a configuration's keys.

    Attributes:
        location_of: function that maps a key to the location of its value, or to None if the key is not set.
        default_location: location for problems with keys that are not set: the last file, or the command line without a
            file.
        problems: problems found so far.
        notes: information for the user, such as a key without effect.
        invalid_keys: keys with a problem; rules about these keys are skipped.
    """

    location_of: Callable[[str], Location | None] = _never_set
    default_location: Location = field(default_factory=ArgumentLocation)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    invalid_keys: set[str] = field(default_factory=set)

    def error(self, message: str, *keys: str) -> None:
        """Record a problem about `keys`, located at the first key that the user set."""
        locations = [location for key in keys if (location := self.location_of(key)) is not None]
        self.problems.append(Problem(keys[0], message, locations[0] if locations else self.default_location))
        self.invalid_keys.update(keys)

    def note(self, message: str, *keys: str) -> None:
        """Record a note about `keys`, located at the first key that the user set."""
        locations = [location for key in keys if (location := self.location_of(key)) is not None]
        self.notes.append(f"{message} ({replace(locations[0], column=None)})" if locations else message)

    def is_set(self, key: str) -> bool:
        """Return whether the user set a key."""
        return self.location_of(key) is not None
