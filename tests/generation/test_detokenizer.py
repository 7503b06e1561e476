"""Text of tokens that arrive one by one, with a tokenizer of bytes and one of words."""

from __future__ import annotations

import pytest

from paddlenlp_ext.generation.detokenizer import IncrementalDetokenizer


def decode_bytes(tokens) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


def decode_words(tokens) -> str:
    return " ".join(f"w{token}" for token in tokens)


def test_detokenizer_writes_complete_characters_only():
    decoder = IncrementalDetokenizer(decode_bytes)
    parts = [decoder.add(token) for token in "aé早🙂.".encode()]
    assert parts == ["a", "", "é", "", "", "早", "", "", "", "🙂", "."]
    assert [decoder.add("é".encode()[0]), decoder.finish(), decoder.finish()] == ["", "\ufffd", ""]


@pytest.mark.parametrize(("context", "expected"), [((), "w1 w2 w3"), ((7, 8), " w1 w2 w3")])
def test_detokenizer_continues_its_context(context, expected):
    decoder = IncrementalDetokenizer(decode_words, context)
    assert "".join(decoder.add(token) for token in (1, 2, 3)) + decoder.finish() == expected


def test_detokenizer_decodes_only_the_tokens_since_the_last_complete_character():
    lengths = []

    def decode(tokens) -> str:
        lengths.append(len(tokens))
        return decode_bytes(tokens)

    decoder = IncrementalDetokenizer(decode)
    assert "".join(map(decoder.add, b"x" * 50)) == "x" * 50 and max(lengths) == 2
