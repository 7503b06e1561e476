"""Run checks that compare results with a reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paddlenlp_ext.doctor.devices_and_dtypes import Target


class Difference(NamedTuple):
    """Largest difference between results and reference.

    Attributes:
        relative: difference divided by the largest magnitude in the reference.
        place: position of the difference, with the value and the reference value.
    """

    relative: float
    place: str


class Check(NamedTuple):
    """One comparison with a reference.

    Attributes:
        area: part of the package, such as "ops".
        name: name of the check within its area.
        target: device and dtype.
        limit: largest relative difference at which the check passes.
        measure: function that returns the difference, or None if the check does not apply to the target.
        is_late: whether the check runs after all checks that are not late.
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
        """True if the difference was measured and does not exceed the limit; NaN fails."""
        return self.difference is not None and self.difference.relative <= self.check.limit


def run_checks(checks: Iterable[Check]) -> Iterator[Result]:
    """Run the checks in order and yield the results, except for checks that do not apply to their target.

    A check that raises an exception fails.
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
    """Return the type and the last line of an error; in Paddle's errors, the last line names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def relative_difference(
    actual: Iterable[np.ndarray], expected: Iterable[np.ndarray], names: Iterable[str] | None = None
) -> Difference:
    """Return the largest relative difference between two lists of arrays.

    The relative difference of two arrays is max |actual - expected| / max |expected|; NaN counts as infinite.

    Args:
        actual: arrays to check.
        expected: reference arrays, in the same order as `actual`.
        names: names of the arrays for `Difference.place`; None: result 1, result 2, ...

    Raises:
        ValueError: `actual` and `expected` do not have the same number of arrays, or two arrays of a pair do not have
            the same shape.
    """
    largest = Difference(0.0, "")
    pairs = list(zip(actual, expected, strict=True))
    for name, (one, other) in zip(names or (f"result {n}" for n in range(1, len(pairs) + 1)), pairs, strict=True):
        if one.shape != other.shape:
            raise ValueError(f"{name} has shape {list(one.shape)}; the reference has shape {list(other.shape)}")
        if one.size:
            gaps = np.abs(one - other)
            at = np.unravel_index(np.argmax(gaps), gaps.shape)  # if a value is NaN, argmax returns the first NaN
            gap = float(gaps[at] / max(float(np.abs(other).max()), _TINY))
            relative = gap if np.isfinite(gap) else float("inf")
            if relative > largest.relative:
                index = f" at {[int(i) for i in at]} of {list(one.shape)}" if one.size > 1 else ""
                largest = Difference(relative, f"{name}{index}: {one[at]:.6g} instead of {other[at]:.6g}")
    return largest


_TINY = 1e-12
