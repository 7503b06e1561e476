"""Incremental detokenization: text from tokens that arrive one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE_CHARACTER = "\ufffd"  # tokenizers decode the first bytes of a character to this


class IncrementalDetokenizer:
    """Convert tokens to text one by one, in complete characters.

    Each token is decoded together with the tokens before it, because some tokenizers write spaces between tokens. Only
    the tokens since the last complete character are decoded again.

    Args:
        decode: function from tokens to text.
        context: last tokens before the new text; empty at the start of a text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(context)
        self._start, self._shown = 0, len(self._tokens)

    def add(self, token: int) -> str:
        """Add a token, and return the text that is complete with it."""
        self._tokens.append(token)
        new = self._new_text()
        if not new or new.endswith(_INCOMPLETE_CHARACTER):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return new

    def finish(self) -> str:
        """Return the text of the remaining bytes, which are not a complete character."""
        new, self._shown = self._new_text(), len(self._tokens)
        return new

    def _new_text(self) -> str:
        return self._decode(self._tokens[self._start :])[len(self._decode(self._tokens[self._start : self._shown])) :]
