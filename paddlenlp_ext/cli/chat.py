"""Chat in the terminal: read a message, stream the answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from paddlenlp_ext.generation.detokenizer import IncrementalDetokenizer
from paddlenlp_ext.generation.generate import GenerationModel, generate
from paddlenlp_ext.utils.stop_signals import keyboard_interrupts

History = list[tuple[str, str]]


class TextStream:
    """Write generated tokens as text; a character is written as soon as all its bytes are generated.

    Args:
        decode: function that decodes token ids to text.
        output: stream for the text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], output: TextIO) -> None:
        self._decoder, self._output = IncrementalDetokenizer(decode), output
        self._written = ""

    def put(self, token: int) -> None:
        """Add a token and write the text that it completes."""
        self._write(self._decoder.add(token))

    def close(self) -> str:
        """Write the remaining text and a line break; return the complete text."""
        self._write(self._decoder.finish())
        self._output.write("\n")
        self._output.flush()
        return self._written

    def _write(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()
        self._written += text


def chat(
    model: GenerationModel,
    encode_prompt: Callable[[str, Sequence[tuple[str, str]]], list[int]],
    decode: Callable[[Sequence[int]], str],
    source: TextIO | None = None,
    output: TextIO | None = None,
    **options: Any,
) -> History:
    """Answer each line until /exit or the end of input; return the turns since the last /reset.

    Args:
        model: the decoder.
        encode_prompt: function that encodes a message and the earlier turns as prompt ids.
        decode: function that decodes token ids to text.
        source: stream of messages, by default standard input; a terminal shows `> ` before each message.
        output: stream for the answers, by default standard output.
        options: further arguments of `generate`.
    """
    source, output = source or sys.stdin, output or sys.stdout
    history: History = []
    if source.isatty():
        generate(model, [[0]], max_new_tokens=1)  # the first call may log messages, which would interrupt an answer
        output.write("Each line is a message. /reset clears the conversation, /exit ends it.\n")
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
            prompts = [encode_prompt(question, history)]
            with keyboard_interrupts():
                generate(model, prompts, batch_size=1, on_token=lambda _, token, put=stream.put: put(token), **options)
        except KeyboardInterrupt:  # Ctrl-C ends the answer and drops the turn, but does not end the chat
            stream.close()
            continue
        history.append((question, stream.close()))
    return history


def _next_line(source: TextIO, output: TextIO) -> str | None:
    if source.isatty():
        output.write("> ")
        output.flush()
    try:
        line = source.readline()
        line.encode()  # fails for unpaired surrogates, which represent invalid UTF-8 in some locales
    except UnicodeError as error:
        raise ValueError(f"standard input is not UTF-8 ({error}); convert it with iconv") from error
    return line.strip() if line else None
