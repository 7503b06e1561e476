"""Check values in JSON files of other programs against small schemas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """Allowed values of a key.

    Attributes:
        words: description of the allowed values for error messages.
        accepts: function that returns whether a value is allowed.
    """

    words: str
    accepts: Callable[[Any], bool]

    def or_null(self) -> Kind:
        """Return a kind that also accepts null."""
        return Kind(f"{self.words}, or null", lambda value: value is None or self.accepts(value))


def whole(minimum: int, maximum: int) -> Kind:
    """Return a kind that accepts the integers in a range."""
    words = f"an integer from {minimum} to {maximum}"
    return Kind(words, lambda value: type(value) is int and minimum <= value <= maximum)


def number(*, above: float = -math.inf, minimum: float = -math.inf, maximum: float = 1e12) -> Kind:
    """Return a kind that accepts the finite numbers in a range."""
    lower = f"above {above:g}" if above > -math.inf else f"from {minimum:g}" if minimum > -math.inf else ""
    bounds = f"{lower} up to {maximum:g}" if lower else f"of at most {maximum:g}"
    return Kind(
        f"a number {bounds}",
        # The comparisons reject NaN, and are exact for infinity and for integers too large for a float.
        lambda value: (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and above < value <= maximum
            and value >= max(minimum, -maximum)
        ),
    )


def list_of(kind: Kind) -> Kind:
    """Return a kind that accepts lists whose entries are all accepted by `kind`."""
    return Kind(
        f"a list whose entries are each {kind.words}",
        lambda value: isinstance(value, list) and all(map(kind.accepts, value)),
    )


def object_of(kind: Kind) -> Kind:
    """Return a kind that accepts objects whose values are all accepted by `kind`."""
    return Kind(
        f"an object whose values are each {kind.words}",
        lambda value: isinstance(value, Mapping) and all(map(kind.accepts, value.values())),
    )


def one_of(*names: str) -> Kind:
    """Return a kind that accepts the strings in `names`."""
    return Kind(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


def either(*kinds: Kind) -> Kind:
    """Return a kind that accepts the values that any of `kinds` accepts."""
    return Kind(" or ".join(kind.words for kind in kinds), lambda value: any(kind.accepts(value) for kind in kinds))


TEXT = Kind("a string", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
OBJECT = Kind("an object", lambda value: isinstance(value, Mapping))


def kinds_by_key(*groups: tuple[Kind, str]) -> dict[str, Kind]:
    """Return a dict from keys to kinds.

    Args:
        groups: pairs (kind, keys), with the keys separated by spaces.
    """
    return {key: kind for kind, keys in groups for key in keys.split()}


def check_values(values: Mapping[str, Any], kinds: Mapping[str, Kind], place: str) -> None:
    """Check the values of the keys in `kinds`; other keys are ignored.

    Args:
        values: the values by key.
        kinds: the allowed values by key.
        place: file or object of the values, for the error message.

    Raises:
        ValueError: a value is not allowed; the message names the key, the place, the allowed values and the value.
    """
    for key, value in values.items():
        kind = kinds.get(key)
        if kind is not None and not kind.accepts(value):
            raise ValueError(f"{key} in {place} must be {kind.words}, got {shown(value)}")


def shown(value: Any) -> str:
    """Return a value as text of at most 60 characters."""
    text = f"a list of {len(value)} entries" if isinstance(value, list) and len(value) > 8 else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
