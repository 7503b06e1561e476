"""Rows of other toolkits, one for each format that their documentation describes: read, or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from paddlenlp_ext.data.prediction_prompts import Prompt, parse_prompt
from paddlenlp_ext.data.rows.conversation import Conversation, Message, ToolCall
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.rows.row_formats import parse_row, parse_text

USER, ANSWER = {"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1"}
USER2, ANSWER2 = {"role": "user", "content": "q2"}, {"role": "assistant", "content": "a2"}
TOOL, CALL = {"name": "f", "parameters": {"type": "object"}}, {"name": "f", "arguments": {"x": 1}}
HUMAN, GPT = {"from": "human", "value": "q1"}, {"from": "gpt", "value": "a1"}
ONE, TWO = (("q1", "a1"),), (("q1", "a1"), ("q2", "a2"))


def parts(role: str, *texts: str, kind: str = "text", **fields: object) -> dict:
    """Return a message of LLaMA-Factory's version 1."""
    return {"role": role, "content": [{"type": kind, "value": text} for text in texts], **fields}


READ = {
    "paddlenlp": ({"src": "q1", "tgt": "a1"}, Conversation.from_turns(None, ONE)),
    "paddlenlp turns": ({"src": ["q1", "q2"], "tgt": ["a1", "a2"]}, Conversation.from_turns(None, TWO)),
    "erniekit": (
        {"system": "You", "src": ["q1", "q2"], "tgt": ["a1", "a2"], "label": [0, 1]},
        Conversation.from_turns("You", TWO, frozenset({0})),
    ),
    "erniekit alpaca": ({"instruction": "q1", "input": "", "output": "a1"}, Conversation.from_turns(None, ONE)),
    "paddleformers": ({"messages": [USER, ANSWER], "label": 1}, Conversation.from_turns(None, ONE)),
    "llama-factory alpaca": (
        {"instruction": "q2", "input": "", "output": "a2", "system": "You", "history": [["q1", "a1"]]},
        Conversation.from_turns("You", TWO),
    ),
    "llama-factory sharegpt": ({"conversations": [HUMAN, GPT], "tools": ""}, Conversation.from_turns(None, ONE)),
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
        Conversation.from_turns("You", TWO, frozenset({0})),
    ),
    "llama-factory kto, good": ({"messages": [USER, ANSWER], "label": True}, Conversation.from_turns(None, ONE)),
    "swift query": (
        {"system": "You", "query": "q2", "response": "a2", "history": [["q1", "a1"]]},
        Conversation.from_turns("You", TWO),
    ),
    "swift channel": ({"messages": [USER, ANSWER], "channel": "math"}, Conversation.from_turns(None, ONE)),
    "swift loss": (
        {"messages": [USER, ANSWER | {"loss": False}, USER2, ANSWER2 | {"loss": True}]},
        Conversation.from_turns(None, TWO, frozenset({0})),
    ),
    "metamathqa": (
        {"query": "q1", "response": "a1", "type": "GSM", "original_question": "q"},
        Conversation.from_turns(None, ONE),
    ),
    "axolotl chat": (
        {
            "conversations": [
                HUMAN | {"train": False},
                GPT | {"train": False},
                {"from": "human", "value": "q2", "train": False},
                {"from": "assistant", "value": "a2", "train": True},
            ]
        },
        Conversation.from_turns(None, TWO, frozenset({0})),
    ),
    "trl prompt": ({"prompt": "q1", "completion": " a1"}, Conversation.from_turns(None, (("q1", " a1"),))),
    "trl conversational prompt": (
        {"prompt": [USER, ANSWER, USER2], "completion": [ANSWER2]},
        Conversation.from_turns(None, TWO, frozenset({0})),
    ),
    "prompt whose answer has a weight": (
        {"prompt": [USER, ANSWER | {"weight": 1}, USER2], "completion": [ANSWER2]},
        Conversation.from_turns(None, TWO),
    ),
    "mlx completions": ({"prompt": "q1", "completion": "a1"}, Conversation.from_turns(None, ONE)),
    "openai weights": (
        {"messages": [USER, ANSWER | {"weight": 0}, USER2, ANSWER2 | {"weight": 1}]},
        Conversation.from_turns(None, TWO, frozenset({0})),
    ),
    "torchtune instruct": ({"input": "q1", "output": "a1"}, Conversation.from_turns(None, ONE)),
}

PREFERENCE = "preference training"
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
    "call without a function": ({"messages": [USER, ANSWER | {"tool_calls": [{"type": "function"}]}]}, "add 'name'"),
    "call without arguments": (
        {"messages": [USER, ANSWER | {"tool_calls": [{"function": {"name": "f"}}]}]},
        r"messages\[1\]\.tool_calls\[0\] calls f without 'arguments'",
    ),
    "call with a list": (
        {"messages": [USER, ANSWER | {"tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
        "the arguments of f are a list; write an object",
    ),
    "tools without a name": ({"conversations": [HUMAN, GPT], "tools": "[{}]"}, "tools has no keys; add 'name'"),
    "tools in two forms": ({"messages": [USER, ANSWER], "tools": [TOOL], "functions": [TOOL]}, "tools and functions"),
    "tools in a message": (
        {"messages": [USER, ANSWER | {"tools": [TOOL]}]},
        "tools is read only at the top level of a row",
    ),
    "tool choice": ({"messages": [USER, ANSWER], "tool_choice": "required"}, "tool_choice is not passed"),
    "parallel calls": (
        {"messages": [USER, ANSWER | {"tool_calls": [CALL, CALL]}], "parallel_tool_calls": False},
        "the answer has several tool calls, but parallel_tool_calls is false",
    ),
    "calls of the user": (
        {"messages": [USER | {"tool_calls": [CALL]}, ANSWER]},
        "only assistant messages may have this field",
    ),
    "two thoughts": (
        {"messages": [USER, ANSWER | {"reasoning_content": "a", "thinking": "b"}]},
        "thinking differs from the reasoning in reasoning_content; keep one of the two",
    ),
    "thoughts in the content and in a field": (
        {"messages": [USER, parts("assistant", "a", kind="reasoning", thinking="b")]},
        "thinking differs from the reasoning in the content; keep one of the two",
    ),
    "reasoning of an alpaca row": ({"instruction": "q", "output": "a", "reasoning": "b"}, "write the row as messages"),
    "two choices of thinking": (
        {"messages": [USER, ANSWER], "enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
        "enable_thinking differs from chat_template_kwargs",
    ),
    "thinking as text": ({"messages": [USER, ANSWER], "enable_thinking": "false"}, "write true or false"),
    "llama-factory dpo": ({"conversations": [HUMAN], "chosen": GPT, "rejected": GPT}, f"chosen.*{PREFERENCE}"),
    "llama-factory alpaca dpo": ({"instruction": "q", "chosen": "a", "rejected": "b"}, f"chosen.*{PREFERENCE}"),
    "llama-factory kto, bad": ({"instruction": "q", "output": "a", "kto_tag": False}, "kto_tag is not true"),
    "llama-factory images": ({"messages": [USER, ANSWER], "images": ["1.jpg"]}, "images is not supported"),
    "llama-factory v1 dpo": (
        {"chosen_messages": [parts("user", "q")], "rejected_messages": [parts("user", "q")]},
        f"chosen_messages.*{PREFERENCE}",
    ),
    "llama-factory v1 reasoning of the user": (
        {"messages": [parts("user", "why", kind="reasoning"), ANSWER]},
        "type 'reasoning', not \"text\"; only assistant messages may have this type",
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


CALLED = Message("assistant", "", tool_calls=(ToolCall("f", {"x": 1}),), is_target=True)
ASKED, RESULT = Message("user", "q1"), Message("tool", "2")
THOUGHT = Message("assistant", "a1", reasoning="why", is_target=True)
ANSWERED = Message("assistant", "a1", is_target=True)
WITH_TOOLS = Conversation((ASKED, CALLED, RESULT, ANSWERED), ({"type": "function", "function": TOOL},))
ID_CALL = {"id": "7", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
OBSERVED = [{"from": "observation", "value": "2"}, GPT]
READ_MESSAGES = {
    "openai tools": (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [ID_CALL]},
                {"role": "tool", "content": "2", "tool_call_id": "7"},
                ANSWER,
            ],
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "auto",
        },
        Conversation(
            (
                ASKED,
                replace(CALLED, tool_calls=(ToolCall("f", {"x": 1}, "7"),)),
                replace(RESULT, call_id="7"),
                ANSWERED,
            ),
            WITH_TOOLS.tools,
        ),
    ),
    "openai functions": (
        {
            "messages": [
                USER,
                {"role": "assistant", "function_call": {"name": "f", "arguments": '{"x": 1}'}},
                {"role": "function", "name": "f", "content": "2"},
                ANSWER,
            ],
            "functions": [TOOL],
        },
        replace(WITH_TOOLS, messages=(ASKED, CALLED, replace(RESULT, name="f"), ANSWERED)),
    ),
    "llama-factory function_call": (
        {
            "conversations": [HUMAN, {"from": "function_call", "value": json.dumps(CALL)}, *OBSERVED],
            "tools": json.dumps([TOOL]),
        },
        WITH_TOOLS,
    ),
    "llama-factory thought before a call": (
        {"conversations": [HUMAN, {"from": "function_call", "value": f"<think>\nwhy\n</think>\n\n{json.dumps(CALL)}"}]},
        Conversation((ASKED, replace(CALLED, reasoning="why"))),
    ),
    "llama-factory several calls": (
        {"conversations": [HUMAN, {"from": "function_call", "value": json.dumps([CALL, CALL])}, *OBSERVED]},
        Conversation((ASKED, replace(CALLED, tool_calls=CALLED.tool_calls * 2), RESULT, ANSWERED)),
    ),
    "llama-factory v1 parts": (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "reasoning", "value": "why"},
                        {"type": "text", "value": "so"},
                        {"type": "tool_call", "value": json.dumps(CALL)},
                    ],
                },
            ]
        },
        Conversation((ASKED, replace(CALLED, content="so", reasoning="why"))),
    ),
    "swift tool_call": (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": "so"},
                {"role": "tool_call", "content": json.dumps(CALL)},
                {"role": "tool_call", "content": json.dumps(CALL)},
                {"role": "tool_response", "content": "2"},
                ANSWER,
            ],
            "tools": json.dumps([TOOL]),
        },
        replace(
            WITH_TOOLS,
            messages=(
                ASKED,
                replace(CALLED, content="so", tool_calls=CALLED.tool_calls * 2),
                RESULT,
                ANSWERED,
            ),
        ),
    ),
    "swift pretraining": ({"messages": [ANSWER]}, Conversation((ANSWERED,))),
    "trl thinking": ({"messages": [USER, ANSWER | {"thinking": "why"}]}, Conversation((ASKED, THOUGHT))),
    "reasoning_content": ({"messages": [USER, ANSWER | {"reasoning_content": "why"}]}, Conversation((ASKED, THOUGHT))),
    "sharegpt reasoning": ({"conversations": [HUMAN, GPT | {"reasoning": "why"}]}, Conversation((ASKED, THOUGHT))),
    "alpaca tools and variables": (
        {"instruction": "q1", "output": "a1", "tools": [TOOL], "enable_thinking": False},
        Conversation((ASKED, ANSWERED), WITH_TOOLS.tools, {"enable_thinking": False}),
    ),
    "variables as text": (
        {"src": "q1", "tgt": "a1", "chat_template_kwargs": '{"enable_thinking": true}', "reasoning_effort": "low"},
        Conversation((ASKED, ANSWERED), (), {"enable_thinking": True, "reasoning_effort": "low"}),
    ),
    "system in the middle": (
        {"messages": [USER, ANSWER, {"role": "developer", "content": "You"}, USER2]},
        Conversation((ASKED, ANSWERED, Message("system", "You"), Message("user", "q2"))),
    ),
}


@pytest.mark.parametrize("name", READ_MESSAGES)
def test_parse_row_with_tools_or_thoughts_of_another_toolkit_is_read(name):
    row, expected = READ_MESSAGES[name]
    assert parse_row(row) == expected


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
        assert prompt == Prompt(Conversation.asking("q1"), None), row
    prompt = parse_prompt({"prompt": [USER, ANSWER, USER2], "completion": [ANSWER2]})
    assert (prompt.src, prompt.tgt, prompt.text) == (["q1", "q2"], ["a1", "a2"], "q2")
