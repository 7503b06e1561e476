"""Checks that each measure one difference from reference numbers, and their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paddlenlp_ext.doctor.targets import Target


class Difference(NamedTuple):
    """Difference from reference numbers.

    Attributes:
        relative: largest difference, relative to the largest magnitude of the reference numbers.
        place: where it is, and both numbers there.
    """

    relative: float
    place: str


class Check(NamedTuple):
    """One comparison with reference numbers.

    Attributes:
        area: part of the package, such as "ops".
        name: object of the check within its area.
        target: device and dtype.
        limit: largest relative difference that passes.
        measure: returns the difference, or None if the object does not exist on the target.
        is_late: whether it is run after all others, because they include a similar one.
    """

    area: str
    name: str
    target: Target
    limit: float
    measure: Callable[[], Difference | None]
    is_late: bool = False


@dataclass(frozen=True)
class Result:
    """Outcome of a check; either `difference` or `error` is set."""

    check: Check
    seconds: float
    difference: Difference | None = None
    error: str | None = None

    @property
    def passed(self) -> bool:
        """True if the difference was measured and does not exceed the limit; NaN does not pass."""
        return self.difference is not None and self.difference.relative <= self.check.limit


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


def relative_difference(
    actual: Iterable[np.ndarray], expected: Iterable[np.ndarray], names: Iterable[str] | None = None
) -> Difference:
    """Return the largest |actual - expected| of any array, relative to the array's largest expected magnitude.

    NaN and infinity differ by infinity.

    Args:
        actual, expected: arrays to compare one by one.
        names: name of each array for `Difference.place`; None: numbers from 1 on.

    Raises:
        ValueError: numbers or shapes of the arrays do not match.
    """
    largest = Difference(0.0, "")
    pairs = list(zip(actual, expected, strict=True))
    for name, (one, other) in zip(names or (f"result {n}" for n in range(1, len(pairs) + 1)), pairs, strict=True):
        if one.shape != other.shape:
            raise ValueError(f"{name} has shape {list(one.shape)}; the reference's is {list(other.shape)}")
        if one.size:
            gaps = np.abs(one - other)
            at = np.unravel_index(np.argmax(gaps), gaps.shape)  # of NaN, if there is any
            gap = float(gaps[at] / max(float(np.abs(other).max()), _TINY))
            relative = gap if np.isfinite(gap) else float("inf")
            if relative > largest.relative:
                index = f" at {[int(i) for i in at]} of {list(one.shape)}" if one.size > 1 else ""
                largest = Difference(relative, f"{name}{index}: {one[at]:.6g} instead of {other[at]:.6g}")
    return largest


_TINY = 1e-12
