"""Test the chat loop over a pipe: history, commands, streaming of complete characters."""

from __future__ import annotations

import io
from typing import Any

import pytest

from paddlenlp_ext.cli.chat import TextStream, chat
from paddlenlp_ext.generation.generate import generate
from tests.generation.tiny_models import tiny_model


def decode(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


def run(lines: str, **options: Any) -> tuple[list[tuple[str, list[tuple[str, str]]]], list[tuple[str, str]], str]:
    asked: list[tuple[str, list[tuple[str, str]]]] = []

    def encode_prompt(question, history):
        asked.append((question, list(history)))
        return [len(question), len(history)]

    output = io.StringIO()
    model = tiny_model("llama_grouped_heads")
    history = chat(model, encode_prompt, decode, io.StringIO(lines), output, max_new_tokens=4, **options)
    return asked, history, output.getvalue()


def test_chat_passes_history_and_writes_only_answers():
    asked, history, written = run("hello\n\n  and now \n")
    answers = [decode(generate(tiny_model("llama_grouped_heads"), [p], max_new_tokens=4)[0]) for p in ([5, 0], [7, 1])]
    assert history == [("hello", answers[0]), ("and now", answers[1])]
    assert asked == [("hello", []), ("and now", [("hello", answers[0])])]
    assert written == f"{answers[0]}\n{answers[1]}\n"


def test_chat_with_drafts_gives_the_same_answers():
    assert run("hello\nand now\n", max_draft_tokens=3) == run("hello\nand now\n")


def test_chat_reset_clears_history_and_exit_ends():
    asked, history, _ = run("one\n/reset\ntwo\n/exit\nthree\n")
    assert [(question, len(before)) for question, before in asked] == [("one", 0), ("two", 0)]
    assert [question for question, _ in history] == ["two"]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_chat_with_input_that_is_not_utf8_names_it(errors):
    source = io.TextIOWrapper(io.BytesIO(b"gr\xfc\xdfe\n"), encoding="utf-8", errors=errors)
    with pytest.raises(ValueError, match="standard input is not UTF-8"):
        chat(tiny_model("llama_grouped_heads"), lambda *_: [1], decode, source, io.StringIO())


def test_chat_interrupted_answer_is_dropped():
    model, output, calls = tiny_model("llama_grouped_heads"), io.StringIO(), []

    def encode_prompt(question, history):
        calls.append(len(history))
        if question == "long":
            raise KeyboardInterrupt
        return [1]

    history = chat(model, encode_prompt, decode, io.StringIO("long\nshort\n"), output, max_new_tokens=2)
    assert calls == [0, 0] and [question for question, _ in history] == ["short"]


def test_text_stream_writes_complete_characters():
    """Stream bytes as tokens: an incomplete character decodes to the replacement character."""
    output = io.StringIO()
    stream = TextStream(lambda tokens: bytes(tokens).decode("utf-8", errors="replace"), output)
    written = []
    for byte in "a→b".encode():
        stream.put(byte)
        written.append(output.getvalue())
    assert written == ["a", "a", "a", "a→", "a→b"]
    stream.put(0xE2)
    assert stream.close() == "a→b\ufffd" and output.getvalue() == "a→b\ufffd\n"
