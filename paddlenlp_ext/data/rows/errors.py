"""Errors about invalid rows."""

from __future__ import annotations

from collections.abc import Sequence

from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow, location_of

MAX_LISTED = 20
"""Maximum number of invalid rows that an error message lists; further invalid rows are only counted."""
NOT_SUPPORTED = "not supported"
NO_TARGET = "no target token"
UNKNOWN_FORMAT = "unknown format"


class InvalidRowError(ValueError):
    """Error about a row that violates its format or cannot be tokenized.

    Attributes:
        reason: short category of the error; the statistics count dropped rows by reason.
        path: keys and indices that lead from the row to the invalid value.
        by_policy: whether the row is valid but excluded by an option (`truncation: drop`).
    """

    def __init__(self, reason: str, message: str, path: Sequence[str | int] = (), *, by_policy: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.path = tuple(path)
        self.by_policy = by_policy

    def in_row(self, row: SourceRow) -> InvalidRow:
        """Return the `InvalidRow` that reports this error at the location of the invalid value in `row`."""
        return InvalidRow(location_of(row, self.path), self.reason, str(self), self.by_policy)


class DataError(ValueError):
    """Error about the invalid rows of a dataset; `problems` holds all invalid rows, and the message lists the first."""

    def __init__(self, problems: Sequence[InvalidRow]) -> None:
        self.problems = tuple(problems)
        listed = "\n".join(f"  {problem}" for problem in self.problems[:MAX_LISTED])
        rest = len(self.problems) - MAX_LISTED
        more = f"\n  ... and {rest} more" if rest > 0 else ""
        count = f"{len(self.problems)} invalid row" + ("s" if len(self.problems) != 1 else "")
        renames = any(problem.reason == UNKNOWN_FORMAT for problem in self.problems)
        fixes = "Fix the rows, rename their keys with column_mapping," if renames else "Fix the rows,"
        remedy = f'{fixes} or set "bad_rows": "drop" to skip and count invalid rows.'
        if any(problem.fatal for problem in self.problems):
            remedy = (
                'Fix the rows. "bad_rows": "drop" cannot skip a syntax error in a JSON array, because all rows after '
                "the error would be lost. In a file with one JSON object per line, only the invalid line is skipped."
            )
        super().__init__(f"{count}:\n{listed}{more}\n{remedy}")
