"""Answers with a format: JSON schemas, regular expressions, choices and forced tool calls."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import pytest

from paddlenlp_ext.generation.grammar import GrammarCompiler
from tests.serve.asgi import call
from tests.serve.test_app import CHAT, COMPLETIONS, answer, chat_ids, expected_text
from tests.serve.tiny_server import served

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
    "$defs": {"tag": {"enum": ["red", "grün", None]}},
}
ADD = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["a"]}
NOW = {"type": "object", "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {**ADD, "additionalProperties": False}}},
    {"type": "function", "function": {"name": "now", "parameters": NOW}},
]
FORCED = {"type": "function", "function": {"name": "add"}}
INVALID_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "x"}}}}}
SCHEMA_FIELD = "response_format.json_schema.schema"
HOT = {"temperature": 2, "seed": 3}
OVER_LIMIT = {"type": "object", "properties": {f"k{i}": {"type": "null"} for i in range(1000)}, "required": ["k999"]}


def json_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def chat_body(name: str = "base", **fields: Any) -> dict[str, Any]:
    return {"model": name, "messages": [{"role": "user", "content": "red apple"}], **HOT, **fields}


def test_chats_with_schema_in_a_running_batch_validate_and_leave_others_alone(models):
    """Mix answers with and without a schema, of the base and both adapters, in streams and in full."""
    names = list(models.by_name)
    formatted = [chat_body(name, response_format=json_format(SCHEMA), n=2, logprobs=True) for name in names]
    free = [chat_body(name, max_tokens=9, temperature=0) for name in names]

    async def use(app):
        bodies = [*formatted, *free, *({**body, "stream": True} for body in formatted)]
        return await asyncio.gather(*(call(app, CHAT, body) for body in bodies))

    replies = served(models, use)
    expected = [expected_text(models, name, chat_ids(models, "red apple"), 9) for name in names]
    assert [reply.json["choices"][0]["message"]["content"] for reply in replies[3:6]] == expected
    for reply, stream in zip(replies[:3], replies[6:], strict=True):
        streamed = ["", ""]
        for event in stream.events:
            streamed[event["choices"][0]["index"]] += event["choices"][0]["delta"].get("content", "")
        texts = [choice["message"]["content"] for choice in reply.json["choices"]]
        assert texts == streamed and texts[0] != texts[1]
        for choice, text in zip(reply.json["choices"], texts, strict=True):
            assert choice["finish_reason"] == "stop"
            jsonschema.validate(json.loads(text), SCHEMA)
            assert b"".join(bytes(each["bytes"] or b"") for each in choice["logprobs"]["content"]) or not text


def test_chat_with_json_object_returns_an_object(models):
    body = chat_body(response_format={"type": "json_object"}, logit_bias={"92": 100})
    choice = answer(models, CHAT, body)["choices"][0]
    assert choice["finish_reason"] == "stop" and isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-c]{3}(,[0-9])*"}}, "[a-c]{3}(,[0-9])*"),
        ({"guided_regex": r"\d{4}-\d{2}"}, r"\d{4}-\d{2}"),
        ({"structured_outputs": {"choice": ["ja", "nein", 'v"ie\n']}}, 'ja|nein|v"ie\n'),
        ({"guided_choice": ["grün"]}, "grün"),
        ({"guided_json": {"const": [1]}}, r"\[( |\n)*1( |\n)*\]"),
    ],
)
def test_completion_with_fields_of_vllm_matches(models, fields, pattern):
    body = {"model": "one", "prompt": ["x", "y"], "max_tokens": 99, **HOT, **fields}
    for choice in answer(models, COMPLETIONS, body)["choices"]:
        assert choice["finish_reason"] == "stop" and re.fullmatch(pattern, choice["text"])


def test_format_with_token_limit_or_stop_string_ends_early(models):
    cut = answer(models, CHAT, chat_body(response_format=json_format(SCHEMA), max_tokens=4))["choices"][0]
    assert cut["finish_reason"] == "length"
    body = chat_body(structured_outputs={"regex": "ab{3}c"}, stop="bbb")
    stopped = answer(models, CHAT, body)["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"]) == ("a", "stop")


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"add", "now"}),
        (FORCED, {"add"}),
        ({"type": "function", "function": {"name": "now"}}, {"now"}),
    ],
)
def test_forced_tool_choice_returns_calls_with_valid_arguments(models, choice, names):
    body = chat_body(tools=TOOLS, tool_choice=choice, n=4, parallel_tool_calls=False)
    replies = answer(models, CHAT, body)["choices"]
    for each in replies:
        (called,) = each["message"]["tool_calls"]
        assert each["finish_reason"] == "tool_calls" and each["message"]["content"] is None
        assert called["function"]["name"] in names
        schema = ADD if called["function"]["name"] == "add" else {"type": "object"}
        jsonschema.validate(json.loads(called["function"]["arguments"]), schema)
    reply = served(models, lambda app: call(app, CHAT, {**body, "stream": True}))
    parts = [event["choices"][0] for event in reply.events]
    streamed = {part["index"]: part["delta"]["tool_calls"] for part in parts if "tool_calls" in part["delta"]}
    assert [streamed[index][0]["function"] for index in range(4)] == [
        each["message"]["tool_calls"][0]["function"] for each in replies
    ]


def test_schema_with_optional_tools_returns_json_or_calls(models):
    body = chat_body(
        tools=TOOLS[:1], response_format=json_format(SCHEMA), n=30, max_tokens=120, parallel_tool_calls=False
    )
    kinds = set()
    for choice in answer(models, CHAT, body)["choices"]:
        kinds.add(choice["finish_reason"])
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        if choice["finish_reason"] == "tool_calls":
            jsonschema.validate(json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]), ADD)
    assert kinds >= {"stop", "tool_calls"}


@pytest.mark.parametrize(
    ("fields", "param", "problem"),
    [
        ({"response_format": json_format({"type": "text"})}, SCHEMA_FIELD, "Invalid type: text"),
        ({"response_format": json_format({"multipleOf": 10**6})}, SCHEMA_FIELD, "multipleOf"),
        ({"response_format": json_format(OVER_LIMIT)}, SCHEMA_FIELD, "Current row has"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "guided_json also sets a format"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            {"tools": TOOLS, "tool_choice": {**FORCED, "function": {"name": "x"}}},
            "tool_choice.function.name",
            "add, now",
        ),
        ({"tools": [INVALID_TOOL], "tool_choice": FORCED}, "tools", "Invalid type: x"),
    ],
)
def test_invalid_format_is_an_error_that_names_the_field(models, fields, param, problem):
    reply = served(models, lambda app: call(app, CHAT, chat_body(**fields)))
    error = reply.json["error"]
    assert (reply.status, error["param"]) == (400, param) and problem in error["message"]


def test_compiling_a_grammar_does_not_block_the_event_loop(models, monkeypatch):
    is_healthy, compile_grammar, waited = threading.Event(), GrammarCompiler.compile, []

    def wait_and_compile(self, grammar):
        waited.append(is_healthy.wait(60))
        return compile_grammar(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "compile", wait_and_compile)

    async def use(app):
        request = asyncio.ensure_future(call(app, CHAT, chat_body(guided_choice=["yes"])))
        while (await call(app, "/health")).status != 200 or not waiting(request):
            await asyncio.sleep(0.01)
        is_healthy.set()
        return await request

    def waiting(request) -> bool:
        return request.done() or any(thread.name.startswith("grammars") for thread in threading.enumerate())

    reply = served(models, use)
    assert reply.json["choices"][0]["message"]["content"] == "yes" and waited == [True]
