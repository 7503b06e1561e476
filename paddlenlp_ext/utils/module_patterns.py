"""How configurations name layers: by the end of a dotted name, or by a regular expression for all of it."""

from __future__ import annotations

import re
from collections.abc import Collection

from paddlenlp_ext.utils.registry import did_you_mean


def matches(pattern: str, name: str, key: str) -> bool:
    """Whether `pattern` means the layer `name`. `key` is the option it stands under, for the error.

    Raises:
        ValueError: it is not the name's end and no regular expression.
    """
    if name == pattern or name.endswith(f".{pattern}"):
        return True
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise ValueError(f"{key}: {pattern!r} is no regular expression ({error}).") from None


def matching(pattern: str, names: Collection[str], key: str) -> list[str]:
    """Those of the linear layers `names` that `pattern` means; at least one.

    Raises:
        ValueError: it means none of them, or is no regular expression.
    """
    found = [name for name in names if matches(pattern, name, key)]
    if not found:
        leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
        raise ValueError(
            f"{key}: {pattern!r} matches no linear layer of this model{did_you_mean(pattern.strip('.*'), leaves)} "
            f"Known: {', '.join(leaves)}."
        )
    return found
