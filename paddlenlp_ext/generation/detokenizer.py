"""Incremental detokenization of a stream of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE_CHARACTER = "\ufffd"  # tokenizers decode an incomplete character to the replacement character


class IncrementalDetokenizer:
    """Convert tokens to text one by one, and return only complete characters.

    A token is decoded together with the tokens of the previously returned text, because some tokenizers insert spaces
    between tokens.

    Args:
        decode: function that converts tokens to text.
        context: last tokens before the new text; empty at the start of a text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(context)
        self._start, self._shown = 0, len(self._tokens)

    def add(self, token: int) -> str:
        """Add a token, and return the characters that it completes, or ""."""
        self._tokens.append(token)
        new = self._new_text()
        if not new or new.endswith(_INCOMPLETE_CHARACTER):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return new

    def finish(self) -> str:
        """Return the text of the remaining bytes, which do not form a complete character."""
        new, self._shown = self._new_text(), len(self._tokens)
        return new

    def _new_text(self) -> str:
        return self._decode(self._tokens[self._start :])[len(self._decode(self._tokens[self._start : self._shown])) :]
