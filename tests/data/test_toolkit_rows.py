"""Rows of other toolkits, one for each format that their documentation describes: read, or refused by name."""

from __future__ import annotations

import pytest

from paddlenlp_ext.data.formats import parse_row, parse_text
from paddlenlp_ext.data.prompts import parse_prompt
from paddlenlp_ext.data.types import Conversation, InvalidRowError

USER, ANSWER = {"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1"}
USER2, ANSWER2 = {"role": "user", "content": "q2"}, {"role": "assistant", "content": "a2"}
HUMAN, GPT = {"from": "human", "value": "q1"}, {"from": "gpt", "value": "a1"}
ONE, TWO = (("q1", "a1"),), (("q1", "a1"), ("q2", "a2"))


def parts(role: str, *texts: str, kind: str = "text", **fields: object) -> dict:
    """Return a message of LLaMA-Factory's version 1."""
    return {"role": role, "content": [{"type": kind, "value": text} for text in texts], **fields}


READ = {
    "paddlenlp": ({"src": "q1", "tgt": "a1"}, Conversation(None, ONE)),
    "paddlenlp turns": ({"src": ["q1", "q2"], "tgt": ["a1", "a2"]}, Conversation(None, TWO)),
    "erniekit": (
        {"system": "You", "src": ["q1", "q2"], "tgt": ["a1", "a2"], "label": [0, 1]},
        Conversation("You", TWO, frozenset({0})),
    ),
    "erniekit alpaca": ({"instruction": "q1", "input": "", "output": "a1"}, Conversation(None, ONE)),
    "paddleformers": ({"messages": [USER, ANSWER], "label": 1}, Conversation(None, ONE)),
    "llama-factory alpaca": (
        {"instruction": "q2", "input": "", "output": "a2", "system": "You", "history": [["q1", "a1"]]},
        Conversation("You", TWO),
    ),
    "llama-factory sharegpt": ({"conversations": [HUMAN, GPT], "tools": ""}, Conversation(None, ONE)),
    "llama-factory v1": (
        {
            "messages": [
                parts("system", "You", loss_weight=0.0),
                parts("user", "q", "1", loss_weight=0.0),
                parts("assistant", "a1", loss_weight=0.0),
                parts("user", "q2", loss_weight=0.0),
                parts("assistant", "a2", loss_weight=1.0),
            ]
        },
        Conversation("You", TWO, frozenset({0})),
    ),
    "llama-factory kto, good": ({"messages": [USER, ANSWER], "label": True}, Conversation(None, ONE)),
    "swift query": (
        {"system": "You", "query": "q2", "response": "a2", "history": [["q1", "a1"]]},
        Conversation("You", TWO),
    ),
    "swift channel": ({"messages": [USER, ANSWER], "channel": "math"}, Conversation(None, ONE)),
    "swift loss": (
        {"messages": [USER, ANSWER | {"loss": False}, USER2, ANSWER2 | {"loss": True}]},
        Conversation(None, TWO, frozenset({0})),
    ),
    "metamathqa": ({"query": "q1", "response": "a1", "type": "GSM", "original_question": "q"}, Conversation(None, ONE)),
    "axolotl chat": (
        {
            "conversations": [
                HUMAN | {"train": False},
                GPT | {"train": False},
                {"from": "human", "value": "q2", "train": False},
                {"from": "assistant", "value": "a2", "train": True},
            ]
        },
        Conversation(None, TWO, frozenset({0})),
    ),
    "trl prompt": ({"prompt": "q1", "completion": " a1"}, Conversation(None, (("q1", " a1"),))),
    "trl conversational prompt": (
        {"prompt": [USER, ANSWER, USER2], "completion": [ANSWER2]},
        Conversation(None, TWO, frozenset({0})),
    ),
    "prompt whose answer has a weight": (
        {"prompt": [USER, ANSWER | {"weight": 1}, USER2], "completion": [ANSWER2]},
        Conversation(None, TWO),
    ),
    "mlx completions": ({"prompt": "q1", "completion": "a1"}, Conversation(None, ONE)),
    "openai weights": (
        {"messages": [USER, ANSWER | {"weight": 0}, USER2, ANSWER2 | {"weight": 1}]},
        Conversation(None, TWO, frozenset({0})),
    ),
    "torchtune instruct": ({"input": "q1", "output": "a1"}, Conversation(None, ONE)),
}

PREFERENCE, TOOLS, REASONING = "preference training", "tool calls, which are not supported yet", "reasoning is not supp"
REFUSED = {
    "paddlenlp dpo": ({"src": "q", "tgt": "", "response": [["a"], ["b"]], "sort": [1, 0]}, f"sort.*{PREFERENCE}"),
    "erniekit dpo": ({"src": ["q"], "tgt": [], "response": [["a"], ["b"]], "sort": [1, 0]}, f"sort.*{PREFERENCE}"),
    "responses without order": ({"src": "q", "tgt": "a", "response": ["a", "b"]}, "response is not read in a row of"),
    "erniekit is_system": ({"src": ["You", "q"], "tgt": ["", "a"], "is_system": 1}, "is_system.*the field system"),
    "erniekit no target": ({"src": ["q1"], "tgt": ["a1"], "label": [0]}, "every answer has weight 0"),
    "erniekit other labels": ({"src": ["q1"], "tgt": ["a1"], "label": [1, 0]}, "label has 2 items for 1 turns"),
    "erniekit half": ({"src": ["q1"], "tgt": ["a1"], "label": [0.5]}, r"label\[0\] is 0\.5, neither 1"),
    "erniekit label 0": ({"src": ["q1"], "tgt": ["a1"], "label": 0}, "label is not true"),
    "paddleformers no target": ({"messages": [USER, ANSWER], "label": 0}, "label is not true"),
    "paddleformers labels": ({"messages": [USER, ANSWER], "label": [1]}, "label is not true"),
    "paddleformers dpo": (
        {"messages": [USER], "chosen_response": [ANSWER], "rejected_response": [ANSWER]},
        f"chosen_response.*{PREFERENCE}",
    ),
    "paddleformers chatml dpo": (
        {"messages": [USER, {"preferred_output": ANSWER, "non_preferred_output": ANSWER}]},
        f"preferred_output.*{PREFERENCE}",
    ),
    "paddleformers tools": (
        {"messages": [USER, ANSWER | {"tool_calls": [{"type": "function"}]}]},
        f"tool_calls belongs to {TOOLS}",
    ),
    "tool message": (
        {"messages": [USER, ANSWER, {"role": "tool", "content": "{}"}, ANSWER]},
        f"role 'tool' belongs to {TOOLS}",
    ),
    "llama-factory tools": ({"conversations": [HUMAN, GPT], "tools": "[{}]"}, f"tools belongs to {TOOLS}"),
    "llama-factory function_call": (
        {
            "conversations": [
                HUMAN,
                {"from": "function_call", "value": "{}"},
                {"from": "observation", "value": "1"},
                GPT,
            ]
        },
        f"role 'function_call' belongs to {TOOLS}",
    ),
    "llama-factory dpo": ({"conversations": [HUMAN], "chosen": GPT, "rejected": GPT}, f"chosen.*{PREFERENCE}"),
    "llama-factory alpaca dpo": ({"instruction": "q", "chosen": "a", "rejected": "b"}, f"chosen.*{PREFERENCE}"),
    "llama-factory kto, bad": ({"instruction": "q", "output": "a", "kto_tag": False}, "kto_tag is not true"),
    "llama-factory images": ({"messages": [USER, ANSWER], "images": ["1.jpg"]}, "images is not supported"),
    "llama-factory v1 dpo": (
        {"chosen_messages": [parts("user", "q")], "rejected_messages": [parts("user", "q")]},
        f"chosen_messages.*{PREFERENCE}",
    ),
    "llama-factory v1 reasoning": (
        {"messages": [USER, parts("assistant", "why", kind="reasoning")]},
        f"type 'reasoning', not \"text\"; {REASONING}",
    ),
    "llama-factory v1 tool call": (
        {"messages": [USER, parts("assistant", "{}", kind="tool_call")]},
        "type 'tool_call', not \"text\"; tool calls are not supported yet",
    ),
    "llama-factory v1 image": (
        {"messages": [parts("user", "1.jpg", kind="image_url"), ANSWER]},
        "type 'image_url', not \"text\"; only text can be trained on",
    ),
    "llama-factory columns": ({"prompt": "q", "query": "r", "response": "a"}, "prompt is not read in a row of"),
    "swift sharegpt": (
        {"system": "You", "conversation": [{"human": "q1", "assistant": "a1"}]},
        "conversation is not read",
    ),
    "swift pretraining": ({"messages": [ANSWER]}, "assistant message has no user message before it"),
    "swift dpo": ({"messages": [USER, ANSWER], "rejected_response": "b"}, f"rejected_response.*{PREFERENCE}"),
    "swift kto, bad": ({"messages": [USER, ANSWER], "label": False}, "label is not true"),
    "swift classification": ({"messages": [USER], "label": 1}, "the last message is a user message"),
    "swift grounding": ({"messages": [USER, ANSWER], "objects": {"ref": ["sheep"]}}, "objects is not supported"),
    "axolotl train_detail": (
        {"conversations": [HUMAN, GPT | {"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}]},
        "train_detail is not supported yet",
    ),
    "axolotl template-free": ({"segments": [{"label": True, "text": "a"}]}, "segments is not read; write"),
    "axolotl tokenized": (
        {"input_ids": [1, 2], "labels": [-100, 2], "attention_mask": [1, 1]},
        "input_ids holds tokens",
    ),
    "axolotl pygmalion": ({"conversations": [{"role": "human", "value": "q"}]}, "keys 'role', 'value'; add 'from'"),
    "axolotl gpteacher": ({"instruction": "q", "input": "", "response": "a"}, "add 'output'"),
    "axolotl jeopardy": (
        {"question": "q", "category": "c", "answer": "a"},
        "keys 'question', 'category', 'answer'; known",
    ),
    "axolotl context_qa": (
        {"context": "c", "question": "q", "answer": "a"},
        "keys 'context', 'question', 'answer'; known",
    ),
    "axolotl open_orca": ({"system_prompt": "You", "question": "q", "response": "a"}, "rename the field to system"),
    "axolotl metharme": ({"prompt": "q", "generation": "a"}, "add 'completion'"),
    "trl text": ({"text": "q a"}, "keys 'text'; known formats"),
    "trl prompt only": ({"prompt": "q"}, "add 'completion'"),
    "trl preference": ({"prompt": "q", "chosen": "a", "rejected": "b"}, f"chosen.*{PREFERENCE}"),
    "trl unpaired preference": ({"prompt": "q", "completion": "a", "label": False}, "label is not true"),
    "trl stepwise": ({"prompt": "q", "completions": ["a"], "labels": [True]}, f"completions.*{PREFERENCE}"),
    "trl thinking": ({"messages": [USER, ANSWER | {"thinking": "why"}]}, "thinking is not supported yet"),
    "trl mixed prompt": ({"prompt": [USER], "completion": "a"}, "completion is a string; write a list"),
    "trl mixed completion": ({"prompt": "q", "completion": [ANSWER]}, "completion is a list; write a string"),
    "nemo mask": (
        {"system": "You", "mask": "User", "conversations": [{"from": "User", "value": "q"}]},
        "mask is not supported yet",
    ),
    "torchtune masked": ({"messages": [USER, ANSWER | {"masked": True}]}, "masked is not supported yet"),
    "dolly": ({"instruction": "q", "context": "c", "response": "a"}, "add 'output'"),
    "dolly with output": ({"instruction": "q", "context": "c", "output": "a"}, "context is a string; write an object"),
}


@pytest.mark.parametrize("name", READ)
def test_parse_row_of_another_toolkit_is_read(name):
    row, conversation = READ[name]
    assert parse_row(row) == conversation


@pytest.mark.parametrize("name", REFUSED)
def test_parse_row_of_another_toolkit_is_refused_by_name(name):
    row, message = REFUSED[name]
    with pytest.raises(InvalidRowError, match=message):
        parse_row(row)


@pytest.mark.parametrize("row", [{"text": "q a"}, {"text": ["q", " a"]}, {"text": "q a", "meta": {"timestamp": 1}}])
def test_parse_text_of_another_toolkit_is_read(row):
    assert parse_text(row) == "q a"


def test_parse_row_with_labels_that_would_be_lost_raises():
    labels = {"src": "q", "tgt": "a", "label": [0]}
    with pytest.raises(InvalidRowError, match="label is not true"):
        parse_text(labels)
    with pytest.raises(InvalidRowError, match="label is not true"):
        parse_row({"messages": [USER, ANSWER], "tgt": None, "label": [0]})


def test_parse_prompt_without_an_answer_takes_the_question():
    for row in ({"query": "q1"}, {"prompt": "q1"}, {"prompt": [USER]}, {"prompt": [USER], "completion": []}):
        prompt = parse_prompt(row)
        assert (prompt.text, prompt.history, prompt.reference) == ("q1", (), None), row
    prompt = parse_prompt({"prompt": [USER, ANSWER, USER2], "completion": [ANSWER2]})
    assert (prompt.text, prompt.history, prompt.reference) == ("q2", ONE, "a2")
