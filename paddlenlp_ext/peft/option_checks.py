"""Checks that the methods' options share; a run's file is checked before, a config made in Python only here."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def require_whole(key: str, *values: Any, minimum: int = 1) -> None:
    """Check counts and ranks.

    Raises:
        ValueError: a value is no whole number, or below `minimum`.
    """
    for value in values:
        if type(value) is not int or value < minimum:
            raise ValueError(f"{key}={value!r} is out of range; allowed: a whole number, at least {minimum}")


def require_positive(key: str, *values: Any) -> None:
    """Check scales.

    Raises:
        ValueError: a value is not above 0.
    """
    for value in values:
        if not value > 0:
            raise ValueError(f"{key}={value!r} is out of range; allowed: above 0")


def require_share(key: str, *values: Any) -> None:
    """Check dropouts.

    Raises:
        ValueError: a value is below 0, or not below 1.
    """
    for value in values:
        if not 0 <= value < 1:
            raise ValueError(f"{key}={value!r} is out of range; allowed: at least 0, below 1")


def require_choice(key: str, value: Any, choices: Collection[str]) -> None:
    """Check a word.

    Raises:
        ValueError: it is none of those that there are.
    """
    if value not in choices:
        raise ValueError(f"{key}={value!r} is not known; allowed: {', '.join(choices)}")
