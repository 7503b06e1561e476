"""What is wrong with a configuration, and where: collected first, raised together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Location:
    """Where something was written: a file with line and column (from 1), or the command line (`file` is None)."""

    file: str | None = None
    line: int | None = None
    column: int | None = None
    argument: str | None = None
    order: int = 0
    """Position of the file among those given; the command line comes after all files."""

    def __str__(self) -> str:
        if self.file is None:
            return f"command line: {self.argument}" if self.argument else "command line"
        return ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)

    @property
    def short(self) -> str:
        """The place without its column, for notes."""
        return str(self) if self.line is None else f"{self.file}:{self.line}"

    def sort_key(self) -> tuple[int, int, int]:
        """Order of reading."""
        return (self.order, self.line or 0, self.column or 0)


COMMAND_LINE_ORDER = 1_000_000


@dataclass(frozen=True)
class Problem:
    """One thing to correct. `key` is as the user wrote it, "" where no single key is meant."""

    key: str
    message: str
    place: Location

    @property
    def file(self) -> str | None:
        return self.place.file

    @property
    def line(self) -> int | None:
        return self.place.line

    @property
    def column(self) -> int | None:
        return self.place.column

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


class ConfigError(ValueError):
    """Everything that is wrong with a run's configuration, in the order of reading."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = sorted(problems, key=lambda problem: problem.place.sort_key())
        assert self.problems
        count = len(self.problems)
        title = "1 problem in the configuration:" if count == 1 else f"{count} problems in the configuration:"
        lines = [f"  {number}. {problem}" for number, problem in enumerate(self.problems, start=1)]
        super().__init__("\n".join([title, *lines]))
