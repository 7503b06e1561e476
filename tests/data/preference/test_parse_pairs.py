"""Rows of preference data: formats, fields, and the location of every error."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.data.preference.parse_pairs import parse_preference, unknown_preference_fields
from paddlenlp_ext.data.rows.errors import InvalidRowError


def user(text):
    return {"role": "user", "content": text}


def bot(text, **fields):
    return {"role": "assistant", "content": text, **fields}


SYSTEM = {"role": "system", "content": "s"}
TURNS = [user("q1"), bot("a1"), user("q2")]
SAME_PAIR = [
    {"src": ["q1", "q2"], "tgt": ["a1"], "response": ["good", "bad"], "sort": [1, 0]},
    {"src": ["q1", "q2"], "tgt": ["a1"], "response": ["bad", "good"], "sort": [-2, 0.5]},
    {"prompt": TURNS, "chosen": [bot("good")], "rejected": [bot("bad")]},
    {"chosen": [*TURNS, bot("good")], "rejected": [*TURNS, bot("bad")]},
    {"prompt": "q2", "chosen": [*TURNS, bot("good")], "rejected": [*TURNS, bot("bad")], "prompt_id": "7"},
]
SAME_SINGLE_TURN = [
    {"src": "q", "response": ["good", "bad"], "sort": [1, 0], "system": "s"},
    {"src": ["q"], "tgt": [], "response": ["good", "bad"], "sort": [1, 0], "context": {"system": "s"}},
    {"src": "q", "tgt": "", "response": ["bad", "good"], "sort": [0, 1], "system": "s"},
    {"prompt": "q", "chosen": "good", "rejected": "bad", "system": "s"},
    {"prompt": "q", "chosen": [bot("good")], "rejected": [bot("bad")], "system": "s"},
    {"prompt": [SYSTEM, user("q")], "chosen": [bot("good")], "rejected": [bot("bad")]},
    {"chosen": [SYSTEM, user("q"), bot("good")], "rejected": [SYSTEM, user("q"), bot("bad")]},
]


def parsed(row):
    return [(answer.conversation, answer.is_desirable) for answer in parse_preference(row)]


@pytest.mark.parametrize("rows", [SAME_PAIR, SAME_SINGLE_TURN])
def test_parse_preference_reads_all_formats_alike(rows):
    chosen, rejected = parsed(rows[0])
    assert chosen[1] and not rejected[1] and chosen[0] != rejected[0]
    for row in rows[1:]:
        assert parsed(row) == [chosen, rejected], row


@pytest.mark.parametrize(
    ("row", "is_desirable"),
    [
        ({"prompt": "q", "completion": "a", "label": True}, True),
        ({"prompt": "q", "completion": "a", "label": False}, False),
        ({"prompt": [user("q")], "completion": [bot("a")], "label": 0}, False),
        ({"src": "q", "response": ["a"], "sort": [1]}, True),
        ({"src": ["q"], "tgt": [], "response": ["a"], "sort": [0]}, False),
    ],
)
def test_parse_preference_reads_a_rated_answer(row, is_desirable):
    ((conversation, found),) = parsed(row)
    assert found is is_desirable
    assert conversation == parsed({"prompt": "q", "completion": "a", "label": True})[0][0]


def pair(**fields):
    return {"prompt": "q", "chosen": "good", "rejected": "bad", **fields}


INVALID = [
    ([], (), "wrong type"),
    ({}, (), "unknown format"),
    ({"src": "q", "tgt": "a"}, (), "missing key"),
    ({"prompt": "q", "completion": "a"}, (), "unknown format"),
    (pair(response=["a", "b"], sort=[1, 0], src="q"), (), "unknown format"),
    ({"prompt": "q", "chosen": "good"}, (), "missing key"),
    ({"chosen": "good", "rejected": "bad"}, (), "missing key"),
    (pair(chosen=7), ("chosen",), "wrong type"),
    (pair(prompt=7), ("prompt",), "wrong type"),
    (pair(rejected=[bot("bad")]), ("rejected",), "wrong type"),
    (pair(prompt=[user("q")]), ("chosen",), "wrong type"),
    (
        {"prompt": [user("q"), bot("a", weight=1), user("r")], "chosen": [bot("b")], "rejected": [bot("c")]},
        ("prompt", 1),
        "not supported",
    ),
    (pair(chosen=" "), ("chosen",), "empty target"),
    (pair(rejected=""), ("rejected",), "empty target"),
    (pair(rejected="good"), ("rejected",), "same answers"),
    (pair(images=["i"]), ("images",), "not supported"),
    (pair(chosen_response="x"), ("chosen_response",), "not supported"),
    (pair(output="x"), ("output",), "not supported"),
    (pair(label=False), ("label",), "not supported"),
    ({"prompt": TURNS, "chosen": [bot("")], "rejected": [bot("b")]}, ("chosen", 0, "content"), "empty target"),
    ({"prompt": TURNS, "chosen": [bot("a")], "rejected": [bot(3)]}, ("rejected", 0, "content"), "wrong type"),
    ({"prompt": [user(3)], "chosen": [bot("a")], "rejected": [bot("b")]}, ("prompt", 0, "content"), "wrong type"),
    ({"chosen": [user("q"), bot("")], "rejected": [user("q"), bot("b")]}, ("chosen", 1, "content"), "empty target"),
    ({"chosen": [user("p"), bot("a")], "rejected": [user("q"), bot("b")]}, ("rejected",), "missing key"),
    ({"prompt": "x", "chosen": [user("q"), bot("a")], "rejected": [user("q"), bot("b")]}, ("prompt",), "not supported"),
    ({"src": "q", "response": "good", "sort": [1]}, ("response",), "wrong type"),
    ({"src": "q", "response": ["a", "b", "c"], "sort": [1, 2, 3]}, ("response",), "wrong type"),
    ({"src": "q", "response": ["a", "b"], "sort": [1]}, ("sort",), "unequal lists"),
    ({"src": "q", "response": ["a", "b"], "sort": [1, 1]}, ("sort",), "not supported"),
    ({"src": "q", "response": ["a", "b"], "sort": [1, "0"]}, ("sort", 1), "wrong type"),
    ({"src": "q", "response": ["a", "b"], "sort": [True, False]}, ("sort", 0), "wrong type"),
    ({"src": "q", "response": ["a", ""], "sort": [0, 1]}, ("response", 1), "empty target"),
    ({"src": ["q", "r"], "tgt": [], "response": ["a", "b"], "sort": [0, 1]}, ("tgt",), "unequal lists"),
    ({"src": "q", "tgt": "t", "response": ["a", "b"], "sort": [0, 1]}, ("tgt",), "unequal lists"),
    ({"src": ["q", 3], "tgt": ["t"], "response": ["a", "b"], "sort": [0, 1]}, ("src", 1), "wrong type"),
    ({"src": ["q", "r"], "tgt": [3], "response": ["a", "b"], "sort": [0, 1]}, ("tgt", 0), "wrong type"),
    ({"src": "q", "response": ["a", "b"], "sort": [0, 1], "label": [1]}, ("label",), "not supported"),
    ({"prompt": "q", "completion": "a", "label": "good"}, ("label",), "wrong type"),
    ({"prompt": "q", "completion": "", "label": True}, ("completion",), "empty target"),
]


@pytest.mark.parametrize(("row", "path", "reason"), INVALID, ids=lambda value: json.dumps(value)[:60])
def test_parse_preference_names_the_invalid_part(row, path, reason):
    with pytest.raises(InvalidRowError) as caught:
        parse_preference(row)
    assert (caught.value.path, caught.value.reason) == (path, reason), str(caught.value)
    named = str(caught.value).split("; ")[0]
    assert "completion" not in named or "completion" in row, "the message is about a field that the row does not have"


def test_unknown_preference_fields_are_named_once():
    row = {
        "prompt": [user("q") | {"mood": "calm"}],
        "chosen": [bot("a", stars=5)],
        "rejected": [bot("b", stars=1)],
        "score_chosen": 5,
        "source": "web",
        "margin": None,
    }
    assert list(unknown_preference_fields(row)) == [
        "score_chosen",
        "prompt[].mood",
        "chosen[].stars",
        "rejected[].stars",
    ]
    assert list(unknown_preference_fields({"src": "q", "response": ["a"], "sort": [1], "x": 1})) == ["x"]
    assert list(unknown_preference_fields([])) == []
