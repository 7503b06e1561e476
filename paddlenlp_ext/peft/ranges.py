"""Checks that the methods' options share; a run's file is checked before, a config made in Python only here."""

from __future__ import annotations

from typing import Any


def require_whole(key: str, *values: Any, minimum: int = 1) -> None:
    """Check counts and ranks.

    Raises:
        ValueError: a value is no whole number, or below `minimum`.
    """
    for value in values:
        if type(value) is not int or value < minimum:
            raise ValueError(f"{key}={value!r} is out of range; allowed: a whole number, at least {minimum}.")


def require_positive(key: str, *values: Any) -> None:
    """Check scales.

    Raises:
        ValueError: a value is not above 0.
    """
    for value in values:
        if not value > 0:
            raise ValueError(f"{key}={value!r} is out of range; allowed: above 0.")
