"""A conversation in the terminal: a line in, the answer streamed out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from paddlenlp_ext.generation.generate import Decoder, generate

History = list[tuple[str, str]]
_INCOMPLETE_CHARACTER = "\ufffd"  # what a tokenizer decodes the first bytes of a character to


class TextStream:
    """Writes tokens as text as they come, whole characters only."""

    def __init__(self, decode: Callable[[list[int]], str], output: TextIO) -> None:
        self._decode, self._output = decode, output
        self._tokens: list[int] = []
        self._written = ""

    def put(self, token: int) -> None:
        """Write what this token adds, as far as it is certain."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith(_INCOMPLETE_CHARACTER) or not text.startswith(self._written):
            return
        self._write(text)

    def close(self) -> str:
        """Write what was held back, and a line's end; returns the whole text."""
        text = self._decode(self._tokens)
        self._write(text)
        self._output.write("\n")
        self._output.flush()
        return text

    def _write(self, text: str) -> None:
        self._output.write(text[len(self._written) :])
        self._output.flush()
        self._written = text


def chat(
    model: Decoder,
    encode_prompt: Callable[[str, Sequence[tuple[str, str]]], list[int]],
    decode: Callable[[list[int]], str],
    source: TextIO | None = None,
    output: TextIO | None = None,
    **options: Any,
) -> History:
    """Answer line after line until /exit or the end of input; /reset forgets what was said. Returns the conversation.

    Args:
        model: the decoder.
        encode_prompt: (question, turns before it) to prompt ids.
        decode: token ids to text.
        source: lines to answer, standard input by default; a terminal is shown a prompt, a pipe is not.
        output: where answers go, standard output by default.
        options: further arguments of `generate`.
    """
    source, output = source or sys.stdin, output or sys.stdout
    history: History = []
    if source.isatty():
        generate(model, [[0]], max_new_tokens=1)  # what a first pass logs comes before the conversation
        output.write("A line is a message. /reset forgets the conversation, /exit ends it.\n")
    while (question := _next_line(source, output)) is not None:
        if question == "/exit":
            break
        if question == "/reset":
            history.clear()
            continue
        if not question:
            continue
        stream = TextStream(decode, output)
        try:
            prompt_ids = encode_prompt(question, history)
            generate(model, [prompt_ids], on_token=lambda _, token, put=stream.put: put(token), **options)
        except KeyboardInterrupt:  # ends this answer, not the chat; the turn is forgotten
            stream.close()
            continue
        history.append((question, stream.close()))
    return history


def _next_line(source: TextIO, output: TextIO) -> str | None:
    if source.isatty():
        output.write("> ")
        output.flush()
    line = source.readline()
    return line.strip() if line else None
