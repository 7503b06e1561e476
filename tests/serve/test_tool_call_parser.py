"""Calls of tools in the text of an answer: both forms, text that is no call, and the endpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from paddlenlp_ext.generation.grammar import GrammarCompiler, choice_grammar
from paddlenlp_ext.serve import tool_call_parser
from paddlenlp_ext.serve.app import Limits, make_app
from paddlenlp_ext.serve.tool_call_parser import BareJsonParser, HermesParser, answer_or_calls, parser_class
from tests.common.byte_tokenizer import byte_tokenizer
from tests.golden import DATA
from tests.serve.asgi import call
from tests.serve.tiny_server import readers_of

TOOLS = ("add", "weather")
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
WEATHER = '<tool_call>{"arguments": {"city": "K\u00f6ln </tool_call>"}, "name": "weather"}</tool_call>'
CALLED = [("add", {"a": 1, "b": [2]}), ("weather", {"city": "K\u00f6ln </tool_call>"})]


def read(form, text: str, size: int, **options: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Return the text and the calls of an answer that arrives in parts of `size` characters."""
    reader = form(TOOLS, **options)
    shown = "".join(reader.add(text[index : index + size]) for index in range(0, len(text), size))
    rest, calls = reader.finish()
    assert len({each.id for each in calls}) == len(calls)
    return shown + rest, [(each.name, json.loads(each.arguments)) for each in calls]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (HermesParser, ADD, ("", CALLED[:1])),
        (HermesParser, f"I add <numbers>.\n{ADD}\n{WEATHER}\n", ("I add <numbers>.\n", CALLED)),
        (HermesParser, f"{WEATHER} done", (" done", CALLED[1:])),
        (BareJsonParser, '\n{"name": "add", "parameters": {"a": 1, "b": [2]}}', ("", CALLED[:1])),
        (
            BareJsonParser,
            '{"name": "add", "parameters": {}}; {"name": "add", "parameters": {}};',
            ("", [("add", {})] * 2),
        ),
    ],
)
def test_call_text_of_calls_returns_them_and_the_other_text(form, text, expected, size):
    assert read(form, text, size) == expected


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HermesParser, ""),
        (HermesParser, "a < b, <tool_ca"),
        (HermesParser, ADD[:-1]),
        (HermesParser, ADD.replace("}}", "}")),
        (HermesParser, ADD.replace("[2]", "1e999")),
        (HermesParser, ADD.replace("[2]", "[" * 1500 + "]" * 1500)),
        (HermesParser, ADD.replace("add", "remove")),
        (HermesParser, ADD.replace('{"a": 1, "b": [2]}', "1")),
        (HermesParser, f"{ADD}<tool_call>[]</tool_call>"),
        (HermesParser, '{"name": "add", "parameters": {}}'),
        (BareJsonParser, " \n"),
        (BareJsonParser, 'Call {"name": "add", "parameters": {}}'),
        (BareJsonParser, '{"name": "add", "parameters": {}} is the call'),
        (BareJsonParser, '{"name": "remove", "parameters": {}}'),
        (BareJsonParser, '{"sum": 2}'),
    ],
)
def test_call_text_without_complete_calls_of_the_tools_is_unchanged(form, text, size):
    assert read(form, text, size) == (text, [])


def test_call_text_holds_back_only_what_may_be_a_call():
    hermes, bare = HermesParser(TOOLS), BareJsonParser(TOOLS)
    assert [hermes.add(part) for part in ("x <", "b <tool", "_call", ">{")] == ["x ", "<b ", "", ""]
    assert [bare.add(part) for part in (" ", "no {", '"name"')] == ["", " no {", '"name"']


def test_call_text_returns_at_most_the_limit_of_calls():
    assert read(HermesParser, ADD + WEATHER, 9, max_calls=1) == ("", CALLED[:1])


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("qwen2_5", HermesParser),
        ("qwen3", HermesParser),
        ("smollm3", HermesParser),
        ("llama3_2", BareJsonParser),
        ("qwen3_5", None),  # tags around XML
        ("gemma3", None),
        ("gptoss", None),
    ],
)
def test_parser_class_is_that_of_the_template(name, form):
    template = DATA / "chat_templates" / f"{name}.jinja"
    assert parser_class(template.read_text(encoding="utf-8")) is form


class ScriptedEngine:
    """Engine whose answers are all the same tokens."""

    def __init__(self, tokens: Sequence[int], reason: str) -> None:
        self.tokens, self.reason = tokens, reason

    def submit(self, requests) -> None:
        """Answer at once."""
        for request in requests:
            is_stopped = any(request.on_token(token, None) for token in self.tokens)
            request.on_end("stop" if is_stopped else self.reason)


def chat(models, text: str, reason: str = "stop", **body: Any) -> Any:
    """Return the response to a request whose answer is `text`."""
    tools = [{"type": "function", "function": {"name": name}} for name in body.pop("names", TOOLS)]
    engine: Any = ScriptedEngine(models.by_name["base"].tokenizer(text)["input_ids"], reason)
    full = {"model": "base", "messages": [{"role": "user", "content": "?"}], "max_tokens": 5, "tools": tools, **body}
    reply = asyncio.run(
        call(make_app(models.catalog, readers_of(models), engine, Limits()), "/v1/chat/completions", full)
    )
    assert reply.status == 200, reply.json
    return reply


def test_chat_with_calls_returns_them_in_full_and_in_streams(models):
    answer = f"One moment.{ADD}"
    choice = chat(models, answer).json["choices"][0]
    (called,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "One moment.")
    assert called["type"] == "function" and called["id"].startswith("call_")
    assert (called["function"]["name"], json.loads(called["function"]["arguments"])) == CALLED[0]
    parts = [event["choices"][0] for event in chat(models, answer, stream=True).events]
    assert "".join(part["delta"].get("content", "") for part in parts) == "One moment."
    (streamed,) = [each for part in parts for each in part["delta"].get("tool_calls", ())]
    assert (streamed["index"], streamed["function"]) == (0, called["function"])
    assert parts[-1]["delta"] == {} and parts[-1]["finish_reason"] == "tool_calls"
    history = [{"role": "user", "content": "?"}, choice["message"]]
    history.append({"role": "tool", "tool_call_id": called["id"], "content": "3"})
    assert chat(models, "Three.", messages=history, names=["add"]).json["choices"][0]["message"]["content"] == "Three."


def test_chat_with_calls_alone_has_no_content(models):
    message = chat(models, ADD + WEATHER, parallel_tool_calls=False).json["choices"][0]["message"]
    assert message["content"] is None and [each["function"]["name"] for each in message["tool_calls"]] == ["add"]


@pytest.mark.parametrize(
    ("text", "reason", "body"),
    [(ADD, "stop", {"names": ()}), (ADD, "stop", {"tool_choice": "none"}), (ADD[:-3], "length", {})],
)
def test_chat_without_tools_or_with_a_broken_call_returns_text(models, text, reason, body):
    choice = chat(models, text, reason, **body).json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, reason)
    assert "tool_calls" not in choice["message"]


def test_chat_with_a_stop_text_inside_a_call_returns_the_text_before_it(models):
    choice = chat(models, ADD, stop="</tool").json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (ADD.partition("</tool")[0], "stop")


@pytest.mark.parametrize("form", [HermesParser, BareJsonParser])
def test_answer_or_calls_of_each_format_accepts_calls_that_its_parser_reads(form, monkeypatch):
    pytest.importorskip("llguidance")
    monkeypatch.setattr(tool_call_parser, "_parser_class", lambda template, is_forced: form)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "required": ["ä"]}}}
        for name in ('say "hi"', "now")
    ]
    tokenizer, calls = byte_tokenizer("<|end|>"), [('say "hi"', {"ä": 1}), ("now", {"ä": []})]
    before, between, after = form.call_format
    texts = [
        f"{before}{json.dumps(name)}{between}{json.dumps(values, ensure_ascii=False)}{after}" for name, values in calls
    ]
    text = form.separator.join(texts)
    parser = form([name for name, _ in calls])
    parser.add(text)
    assert [(each.name, json.loads(each.arguments)) for each in parser.finish()[1]] == calls
    template: Any = None
    for forced, limit, accepted in ((["now"], None, texts[1]), (["now", 'say "hi"'], None, text), ([], 1, texts[0])):
        answer = None if forced else choice_grammar(["free"])
        grammar = answer_or_calls(template, tools, limit, forced, answer)
        assert grammar is not None
        state = GrammarCompiler(tokenizer).compile(grammar)
        for token in tokenizer(accepted)["input_ids"]:
            assert state.allowed_tokens(257, [256])[token]
            state.advance(token)
        assert state.allowed_tokens(257, [256])[256] and state.is_complete == (limit == 1)
