"""Find the most similar known name for a mistyped name, and suggest it in error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known word most similar to `word`; None if all similarities are below `cutoff` (1.0: equal).

    A known word that ends with `_` followed by `word` takes precedence, such as `use_dora` for `dora`.
    """
    known = list(known)
    matches = [name for name in known if name.endswith(f"_{word.lower()}")]
    matches = matches or difflib.get_close_matches(word.lower(), known, n=1, cutoff=cutoff)
    return matches[0] if matches else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the ending of an error message about an unknown word: `; did you mean 'x'?` or a full stop."""
    match = nearest(word, known)
    return f"; did you mean {match!r}?" if match else "."
