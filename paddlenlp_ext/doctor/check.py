"""Checks that each measure one difference from reference numbers, and their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paddlenlp_ext.doctor.targets import Target


class Check(NamedTuple):
    """One comparison with reference numbers.

    Attributes:
        area: part of the package, such as "ops".
        name: object of the check within its area.
        target: device and dtype.
        limit: largest relative difference that passes.
        measure: returns the relative difference, or None if the object does not exist on the target.
    """

    area: str
    name: str
    target: Target
    limit: float
    measure: Callable[[], float | None]


@dataclass(frozen=True)
class Result:
    """Outcome of a check; either `difference` or `error` is set."""

    check: Check
    seconds: float
    difference: float | None = None
    error: str | None = None

    @property
    def passed(self) -> bool:
        """True if the difference was measured and does not exceed the limit; NaN does not pass."""
        return self.difference is not None and self.difference <= self.check.limit


def run_checks(checks: Iterable[Check]) -> Iterator[Result]:
    """Run the checks in order and yield their results, without those whose object does not exist on the target.

    A check that raises is a result like any other: its failure is what the doctor is there to find.
    """
    for check in checks:
        started = time.monotonic()
        try:
            difference = check.measure()
        except Exception as error:
            yield Result(check, time.monotonic() - started, error=describe(error))
            continue
        if difference is not None:
            yield Result(check, time.monotonic() - started, difference)


def describe(error: Exception) -> str:
    """Return the type of an error and the last line of its message, which in Paddle's errors names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def relative_difference(actual: Iterable[np.ndarray], expected: Iterable[np.ndarray]) -> float:
    """Return the largest |actual - expected| of any array, relative to the array's largest expected magnitude.

    NaN and infinity differ by infinity.

    Raises:
        ValueError: numbers or shapes of the arrays do not match.
    """
    largest = 0.0
    for one, other in zip(actual, expected, strict=True):
        if one.shape != other.shape:
            raise ValueError(f"result of shape {list(one.shape)}; the reference's is {list(other.shape)}")
        if one.size:
            gap = float(np.abs(one - other).max() / max(float(np.abs(other).max()), _TINY))
            largest = max(largest, gap if np.isfinite(gap) else float("inf"))
    return largest


_TINY = 1e-12
