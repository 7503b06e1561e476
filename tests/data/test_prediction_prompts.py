"""Prompts for prediction: all formats, rows with and without a last answer, and truncation."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.data.prediction_prompts import Prompt, encode_truncated_prompt, parse_prompt, read_prompts
from paddlenlp_ext.data.rows.conversation import Conversation
from paddlenlp_ext.data.rows.errors import InvalidRowError

ONE = ("q1", "a1")


def prompt(question, history, system, reference):
    return Prompt(Conversation.asking(question, history, system), reference)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"src": "q", "tgt": "a"}, prompt("q", (), None, "a")),
        ({"src": "q", "tgt": ""}, prompt("q", (), None, None)),
        ({"src": "q"}, prompt("q", (), None, None)),
        ({"src": ["q1", "q2"], "tgt": ["a1", "a2"]}, prompt("q2", (ONE,), None, "a2")),
        ({"src": ["q1", "q2"], "tgt": ["a1"]}, prompt("q2", (ONE,), None, None)),
        ({"src": ["q1", "q2"], "tgt": ["a1", " "]}, prompt("q2", (ONE,), None, None)),
        ({"src": ["q"]}, prompt("q", (), None, None)),
        ({"src": "q", "context": {"system": "s"}}, prompt("q", (), "s", None)),
        ({"instruction": "q"}, prompt("q", (), None, None)),
        ({"instruction": "q", "input": "i", "output": "a"}, prompt("q\ni", (), None, "a")),
        ({"instruction": "q", "history": [["q1", "a1"]], "output": ""}, prompt("q", (ONE,), None, None)),
        ({"content": "q"}, prompt("q", (), None, None)),
        ({"content": "q", "summary": "a"}, prompt("q", (), None, "a")),
        ({"messages": [{"role": "user", "content": "q"}]}, prompt("q", (), None, None)),
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]},
            prompt("q", (), "s", None),
        ),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
            prompt("q", (), None, "a"),
        ),
        ({"conversations": [{"from": "human", "value": "q"}]}, prompt("q", (), None, None)),
    ],
)
def test_parse_prompt_returns_the_last_question(row, expected):
    assert parse_prompt(row) == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tgt": "a"}, "src"),
        ({"src": ["q1", "q2", "q3"], "tgt": ["a1"]}, "src has 3 items, but tgt has 1"),
        ({"src": 7}, "src is a number"),
        ({"messages": []}, "no turns"),
        (["q"], "write a JSON object"),
    ],
)
def test_parse_prompt_without_a_question_raises(row, message):
    with pytest.raises(InvalidRowError, match=message):
        parse_prompt(row)


def test_prompt_src_and_tgt_are_texts_or_lists():
    single, several = prompt("q", (), None, None), prompt("q2", (ONE,), None, "a2")
    assert (single.src, single.tgt) == ("q", "")
    assert (several.src, several.tgt) == (["q1", "q2"], ["a1", "a2"])


def test_read_prompts_reads_all_rows_or_lists_the_invalid(tmp_path):
    path = tmp_path / "data.json"
    path.write_text('{"src": "a"}\n\n{"src": "b", "tgt": "c"}\n')
    assert [question.text for question in read_prompts(path)] == ["a", "b"]
    path.write_text(json.dumps([{"src": "a"}, {"src": "b"}]))
    assert [question.text for question in read_prompts(path)] == ["a", "b"]
    path.write_text('{"src": "a"}\n{"src": 3}\n{broken\n')
    with pytest.raises(ValueError, match=r"(?s)2 invalid rows.*data.json:2:9.*data.json:3:2"):
        read_prompts(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no rows"):
        read_prompts(path)
    with pytest.raises(ValueError, match="is not a file"):
        read_prompts(tmp_path / "absent.json")


class Letters:
    """Template and tokenizer in one: a letter is a token, and a turn is `<question>answer`."""

    def __init__(self) -> None:
        self.encoder = self.tokenizer = self

    def encode(self, texts, continues):
        return [[ord(letter) for letter in text] for text in texts]

    def decode(self, ids, clean_up_tokenization_spaces=True):
        text = "".join(map(chr, ids))
        return text.replace(" .", ".") if clean_up_tokenization_spaces else text

    def encode_prompt(self, conversation):
        marks = {"system": "{}", "user": "<{}>", "assistant": "{}"}
        text = "".join(marks[message.role].format(message.content) for message in conversation.messages)
        return self.encode([text], [False])[0]


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [(16, "s<q1>a1<abcdefg>"), (15, "s<abcdefg>"), (10, "s<abcdefg>"), (9, "s<abcdef>"), (4, "s<a>"), (3, "s<>")],
)
def test_encode_truncated_prompt_removes_old_turns_then_the_end(max_tokens, expected):
    template = Letters()
    ids, was_truncated = encode_truncated_prompt(template, prompt("abcdefg", (ONE,), "s", None), max_tokens)
    assert template.decode(ids) == expected and was_truncated == (max_tokens < 16)


def test_encode_truncated_prompt_keeps_blanks():
    ids, _ = encode_truncated_prompt(Letters(), prompt("a .bcdef", (), None, None), 6)
    assert bytes(ids) == b"<a .b>"


def test_encode_truncated_prompt_with_too_small_a_limit_raises():
    with pytest.raises(
        ValueError, match="even without its question, the prompt has 3 tokens, more than the limit of 2"
    ):
        encode_truncated_prompt(Letters(), prompt("abc", (), "s", None), 2)
