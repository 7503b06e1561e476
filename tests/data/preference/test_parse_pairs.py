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


def gpt(text, **fields):
    return {"from": "gpt", "value": text, **fields}


SYSTEM = {"role": "system", "content": "s"}
TURNS = [user("q1"), bot("a1"), user("q2")]
DIALOGUE = "\n\nHuman: q1\n\nAssistant: a1\n\nHuman: q2\n\nAssistant: "
SHAREGPT_TURNS = [{"from": "human", "value": "q1"}, gpt("a1"), {"from": "human", "value": "q2"}]
SAME_PAIR = [
    {"src": ["q1", "q2"], "tgt": ["a1"], "response": ["good", "bad"], "sort": [1, 0]},
    {"src": ["q1", "q2"], "tgt": ["a1"], "response": ["bad", "good"], "sort": [-2, 0.5]},
    {"prompt": TURNS, "chosen": [bot("good")], "rejected": [bot("bad")]},
    {"chosen": [*TURNS, bot("good")], "rejected": [*TURNS, bot("bad")]},
    {"prompt": "q2", "chosen": [*TURNS, bot("good")], "rejected": [*TURNS, bot("bad")], "prompt_id": "7"},
    {"prompt": TURNS, "chosen": [*TURNS, bot("good")], "rejected": [*TURNS, bot("bad")]},
    {"chosen": f"{DIALOGUE}good", "rejected": f"{DIALOGUE}bad"},
    {"conversations": SHAREGPT_TURNS, "chosen": gpt("good"), "rejected": gpt("bad")},
    {"instruction": "q2", "chosen": "good", "rejected": "bad", "history": [["q1", "a1"]]},
    {"messages": [*TURNS, bot("good")], "rejected_response": "bad"},
    {"messages": [*TURNS, bot("good")], "rejected_messages": [*TURNS, bot("bad")]},
    {"input": {"messages": TURNS}, "preferred_output": [bot("good")], "non_preferred_output": [bot("bad")]},
]
SAME_SINGLE_TURN = [
    {"system": "s", "question": "q", "chosen": "good", "rejected": "bad"},
    {"src": "q", "response": ["good", "bad"], "sort": [1, 0], "system": "s"},
    {"src": ["q"], "tgt": [], "response": ["good", "bad"], "sort": [1, 0], "context": {"system": "s"}},
    {"src": "q", "tgt": "", "response": ["bad", "good"], "sort": [0, 1], "system": "s"},
    {"prompt": "q", "chosen": "good", "rejected": "bad", "system": "s"},
    {"prompt": "q", "chosen": [bot("good")], "rejected": [bot("bad")], "system": "s"},
    {"prompt": [SYSTEM, user("q")], "chosen": [bot("good")], "rejected": [bot("bad")]},
    {"chosen": [SYSTEM, user("q"), bot("good")], "rejected": [SYSTEM, user("q"), bot("bad")]},
    {
        "prompt": "q",
        "prompt_id": "1",
        "chosen": [SYSTEM, user("q"), bot("good")],
        "rejected": [SYSTEM, user("q"), bot("bad")],
        "messages": [SYSTEM, user("q"), bot("good")],
        "score_chosen": 8.0,
        "score_rejected": 3.5,
    },
    {"instruction": "q", "input": "", "chosen": "good", "rejected": "bad", "system": "s", "history": []},
    {
        "input": {"messages": [SYSTEM, user("q")], "tools": [], "parallel_tool_calls": True},
        "preferred_output": [bot("good")],
        "non_preferred_output": [bot("bad")],
    },
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
    "row",
    [
        {"messages": [*TURNS, bot("a2")], "label": False},
        {"messages": [*TURNS, bot("a2")], "kto_tag": False},
        {"conversations": [*SHAREGPT_TURNS, gpt("a2")], "kto_tag": False},
        {"instruction": "q2", "output": "a2", "history": [["q1", "a1"]], "kto_tag": False},
        {"query": "q2", "response": "a2", "history": [["q1", "a1"]], "label": False},
        {"prompt": TURNS, "completion": [bot("a2")], "label": False},
    ],
)
def test_parse_preference_of_a_rated_conversation_has_the_last_answer_as_its_only_target(row):
    ((conversation, is_desirable),) = parsed(row)
    assert [message.content for message in conversation.messages] == ["q1", "a1", "q2", "a2"]
    assert [message.is_target for message in conversation.messages] == [False, False, False, True] and not is_desirable


def test_parse_preference_of_texts_without_prompt_splits_before_the_last_common_space():
    """The expected texts are the result of TRL's `extract_prompt`."""
    chosen, rejected = parsed({"chosen": "The sky is blue.", "rejected": "The sky is green."})
    assert [[message.content for message in answer.messages] for answer, _ in (chosen, rejected)] == [
        ["The sky is", " blue."],
        ["The sky is", " green."],
    ]


CALLS = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}] * 2}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def openai(answer, **fields):
    return {
        "input": {"messages": [user("q")], **fields},
        "preferred_output": [answer],
        "non_preferred_output": [bot("bad")],
    }


def test_parse_preference_of_openai_reads_the_tools_of_input():
    chosen, rejected = parsed(openai(CALLS, tools=TOOLS, parallel_tool_calls=True))
    assert [*chosen[0].tools] == [*rejected[0].tools] == TOOLS
    assert len(chosen[0].messages[1].tool_calls) == 2


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
    ({"chosen": "good", "rejected": "bad"}, ("rejected",), "missing key"),
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
    ({"chosen": [user("q"), bot("a")], "rejected": [user("q")]}, ("rejected",), "empty target"),
    (
        {"prompt": [user("q")], "chosen": [user("q"), bot("a")], "rejected": [bot("b")]},
        ("rejected",),
        "not supported",
    ),
    (
        {"chosen": [user("q"), bot("a")], "rejected": [user("q"), bot("b")], "messages": [user("q"), bot("c")]},
        ("messages",),
        "not supported",
    ),
    (pair(question="r"), ("prompt",), "not supported"),
    (pair(conversations=[]), ("prompt",), "not supported"),
    ({"question": "q", "chosen": "a", "rejected": "b", "messages": [user("q")]}, ("messages",), "not supported"),
    ({"question": "q", "chosen": "a", "rejected": ""}, ("rejected",), "empty target"),
    ({"question": 3, "chosen": "a", "rejected": "b"}, ("question",), "wrong type"),
    ({"question": "q", "instruction": "q", "chosen": "a", "rejected": "b"}, (), "unknown format"),
    ({"chosen": DIALOGUE + "a", "rejected": DIALOGUE}, ("rejected",), "empty target"),
    ({"chosen": "\n\nHuman: p\n\nAssistant: a", "rejected": DIALOGUE + "a"}, ("rejected",), "missing key"),
    ({"instruction": "q", "chosen": "a", "rejected": "a"}, ("rejected",), "same answers"),
    ({"instruction": "q", "chosen": "a", "rejected": 3}, ("rejected",), "wrong type"),
    ({"instruction": "q", "output": "c", "chosen": "a", "rejected": "b"}, ("output",), "not supported"),
    ({"conversations": SHAREGPT_TURNS, "chosen": [gpt("a")], "rejected": gpt("b")}, ("chosen",), "wrong type"),
    ({"conversations": SHAREGPT_TURNS, "chosen": gpt("a"), "rejected": gpt("")}, ("rejected", "value"), "empty target"),
    (
        {"conversations": SHAREGPT_TURNS, "chosen": gpt("a"), "rejected": gpt("b"), "kto_tag": True},
        (),
        "unknown format",
    ),
    (
        {"conversations": [gpt("a", weight=1)], "chosen": gpt("a"), "rejected": gpt("b")},
        ("conversations", 0),
        "not supported",
    ),
    ({"messages": [*TURNS, bot("a")], "rejected_response": "a"}, ("rejected_response",), "same answers"),
    ({"messages": [*TURNS, bot("a")], "rejected_response": ""}, ("rejected_response",), "empty target"),
    ({"messages": TURNS, "rejected_response": "a"}, ("messages", 2), "role order"),
    ({"messages": [], "rejected_response": "a"}, (), "empty target"),
    ({"messages": [*TURNS, bot("a")], "rejected_response": ["b"]}, ("rejected_response",), "wrong type"),
    (
        {"messages": [user("q"), bot("a")], "rejected_messages": [user("r"), bot("a")]},
        ("rejected_messages",),
        "missing key",
    ),
    (
        {"messages": [user("q"), bot("a")], "rejected_response": "b", "rejected_images": ["i"]},
        ("rejected_images",),
        "not supported",
    ),
    ({"messages": [user("q"), bot("a")], "rejected_response": "b", "label": True}, (), "unknown format"),
    ({"messages": [user("q"), bot("a")], "label": True, "kto_tag": True}, ("kto_tag",), "not supported"),
    (
        {"messages": [user("q"), bot("a", weight=1), user("r"), bot("b")], "label": True},
        ("messages", 1),
        "not supported",
    ),
    ({"messages": [user("q"), bot("a")], "label": 2}, ("label",), "wrong type"),
    (openai(bot("bad")), ("non_preferred_output",), "same answers"),
    (openai(bot("")), ("preferred_output", 0, "content"), "empty target"),
    (openai(CALLS, parallel_tool_calls=False), ("preferred_output", 0), "not supported"),
    (openai(CALLS, parallel_tool_calls="no"), ("input", "parallel_tool_calls"), "not supported"),
    (openai(CALLS, tools=3), ("input", "tools"), "wrong type"),
    (openai(CALLS, tools=TOOLS) | {"tools": TOOLS}, ("input", "tools"), "not supported"),
    (openai(bot("a")) | {"input": "q"}, ("input",), "wrong type"),
    (openai(bot("a")) | {"input": {}}, ("input",), "missing key"),
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


@pytest.mark.parametrize("chosen", ["", "good", [user("q")]], ids=["empty", "text", "messages"])
def test_parse_preference_without_a_common_start_gives_the_remedy(chosen):
    rejected = "bad" if isinstance(chosen, str) else [user("other"), bot("bad")]
    with pytest.raises(InvalidRowError, match="chosen and rejected have no common prefix; start both with the prompt"):
        parse_preference({"chosen": chosen, "rejected": rejected})


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
        "chosen[].stars",
        "rejected[].stars",
        "prompt[].mood",
    ]
    assert list(unknown_preference_fields({"src": "q", "response": ["a"], "sort": [1], "x": 1})) == ["x"]
    assert list(unknown_preference_fields([])) == []
    row = {"conversations": [], "chosen": gpt("a", stars=5), "rejected": gpt("b"), "score": 1}
    assert list(unknown_preference_fields(row)) == ["chosen.stars"]
    row = openai(bot("a", stars=5), mood="calm") | {"note": 1}
    assert list(unknown_preference_fields(row)) == ["note", "preferred_output[].stars", "input.mood"]
