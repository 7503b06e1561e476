"""The nearest known word to a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, or None where nothing is close enough to be meant.

    A known word that is `word` behind a prefix (`use_dora` for `dora`) is nearer than any other spelling.
    """
    known = list(known)
    matches = [name for name in known if name.endswith(f"_{word.lower()}")]
    matches = matches or difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """How a sentence about an unknown word ends: `; did you mean 'x'?`, or just so."""
    match = nearest(word, known)
    return f"; did you mean {match!r}?" if match else "."
