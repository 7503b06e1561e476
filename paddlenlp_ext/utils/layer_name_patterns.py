"""Match layer names such as `target_modules`, by a suffix of the dotted name or a regular expression for all of it."""

from __future__ import annotations

import re
from collections.abc import Collection

from paddlenlp_ext.utils.suggest import did_you_mean


def matches(pattern: str, name: str, key: str) -> bool:
    """Return whether a pattern matches a layer name.

    Args:
        pattern: suffix of a dotted name, or regular expression for the full name.
        name: name of the layer.
        key: option with the pattern, for the error message.

    Raises:
        ValueError: the pattern is neither a suffix of the name nor a valid regular expression.
    """
    if name == pattern or name.endswith(f".{pattern}"):
        return True
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise ValueError(f"{key}: {pattern!r} is not a regular expression ({error})") from None


def matching(pattern: str, names: Collection[str], key: str, kind: str = "linear layer") -> list[str]:
    """Return the names that a pattern matches, at least one.

    Args:
        pattern: see `matches`.
        names: names of layers.
        key: option with the pattern, for the error message.
        kind: kind of layer, for the error message.

    Raises:
        ValueError: the pattern matches no layer, or is not a regular expression.
    """
    found = [name for name in names if matches(pattern, name, key)]
    if not found:
        leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
        raise ValueError(
            f"{key}: {pattern!r} matches no {kind} of this model{did_you_mean(pattern.strip('.*'), leaves)} "
            f"Known: {', '.join(leaves)}."
        )
    return found
