"""Match layer names with patterns, such as `target_modules`.

A pattern is a suffix of the dotted name or a regular expression for the full name.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from paddlenlp_ext.utils.suggest import did_you_mean


def matches(pattern: str, name: str, key: str) -> bool:
    """Return whether a pattern matches a layer name.

    Args:
        pattern: suffix of a dotted name, or regular expression for the full name.
        name: name of the layer.
        key: option that contains the pattern, for the error message.

    Raises:
        ValueError: the pattern is neither a suffix of the name nor a valid regular expression.
    """
    if has_suffix(name, pattern):
        return True
    check_pattern(pattern, key)
    return re.fullmatch(pattern, name) is not None


def has_suffix(name: str, suffix: str) -> bool:
    """Return whether `suffix` equals a dotted name, or its last components."""
    return f".{name}".endswith(f".{suffix}")


def check_pattern(pattern: str, key: str) -> None:
    """Check that a pattern is a regular expression; `key` is the option that contains the pattern.

    Raises:
        ValueError: the pattern is not a regular expression.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"{key}: {pattern!r} is not a regular expression ({error}); write the name of a layer, the end of "
            "the name, or a regular expression"
        ) from None


def matching(pattern: str, names: Collection[str], key: str, kind: str = "linear layer") -> list[str]:
    """Return the layer names that a pattern matches.

    Args:
        pattern: see `matches`.
        names: names of layers.
        key: option that contains the pattern, for the error message.
        kind: kind of layer, for the error message.

    Raises:
        ValueError: the pattern does not match any layer, or is not a regular expression.
    """
    found = [name for name in names if matches(pattern, name, key)]
    if not found:
        leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
        raise ValueError(
            f"{key}: {pattern!r} matches no {kind} of this model{did_you_mean(pattern.strip('.*'), leaves)} "
            f"Known: {', '.join(leaves)}."
        )
    return found
