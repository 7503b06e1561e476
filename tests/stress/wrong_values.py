"""Wrong values for a JSON document, and random changes of documents and bytes."""

from __future__ import annotations

import copy
import functools
import math
import operator
import random
from typing import Any

WRONG: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 10**9, 2**31, 2**63, 10**30, -(10**30)),
    *(0.0, -0.0, 0.5, 1.5, -2.5, 1e-300, 1e9, 1e300, float("nan"), float("inf"), float("-inf")),
    *("", "x", "0", "1e9", "None", "../x", "\x00", "\ud800", "a" * 1000),
    *([], [None], [0], ["x"], [[1]], [1.5, "x"], {}, {"x": 1}, {"": None}, {"full_attention": {}}, {"a": {"b": [1]}}),
)


OF_OTHER_TYPE: dict[type, tuple[Any, ...]] = {
    bool: (2, "x", [], {"x": 1}, math.nan),
    int: ("x", [], {"x": 1}, math.nan, math.inf, 1.5, True, -2, 10**12, 1e9),
    float: ("x", [], {"x": 1}, math.nan, math.inf, True, -2, 1e300),
    str: (5, [], {"x": 1}, math.nan, True),
    list: (2, "x", {"x": 1}, [math.nan], [{}], [None]),
    dict: (2, "x", [], True, {"x": {"y": math.nan}}),
}
"""Type of a valid value -> values that no key with a value of this type can have."""


def places(document: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the paths of all values in a document, except of the document."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    found: list[tuple[str | int, ...]] = []
    for key, value in items:
        found += [(*path, key), *places(value, (*path, key))]
    return found


def value_at(document: Any, path: tuple[str | int, ...]) -> Any:
    """Return the value at a path."""
    return functools.reduce(operator.getitem, path, document)


def replaced(document: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """Return a copy of a document with another value at a path."""
    changed = copy.deepcopy(document)
    value_at(changed, path[:-1])[path[-1]] = value
    return changed


def mutate(document: Any, rng: random.Random, extra_keys: tuple[str, ...] = ()) -> Any:
    """Return a copy of an object with 1 to 3 values replaced, removed or added."""
    changed = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        known = places(changed)
        if extra_keys and (not known or rng.random() < 0.4):
            changed[rng.choice(extra_keys)] = copy.deepcopy(rng.choice(WRONG))
            continue
        *parents, last = rng.choice(known)
        parent = value_at(changed, tuple(parents))
        if rng.random() < 0.1:
            del parent[last]
        else:
            parent[last] = copy.deepcopy(rng.choice(WRONG))
        if not changed:
            break
    return changed


def damage(content: bytes, rng: random.Random) -> bytes:
    """Return bytes with some of them changed, cut out, doubled or cut off."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not data:
            break
        at = rng.randrange(len(data))
        kind = rng.randrange(6)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif kind == 2:
            data[at : at + 8] = rng.choice((2**63 - 1, 2**64 - 1, 2**32, 2**40, 0)).to_bytes(8, "little")
        elif kind == 3:
            del data[at : at + rng.randrange(1, 40)]
        elif kind == 4:
            data[at:at] = data[at : at + rng.randrange(1, 40)]
        else:
            del data[at:]
    return bytes(data)
