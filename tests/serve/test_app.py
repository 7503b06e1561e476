"""Answers of the server: equal to generate() and to a direct forward pass, in full and in streams."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation.generate import generate
from paddlenlp_ext.serve.app import Limits
from paddlenlp_ext.serve.errors import ApiError
from paddlenlp_ext.serve.request_fields import parse_body
from tests.serve.asgi import call
from tests.serve.tiny_server import END, served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXTS = ("red apple", "Grün? 早く!", "x")


def answer(models, path: str, body: dict[str, Any]) -> Any:
    """Return the JSON of the answer to one request."""
    reply = served(models, lambda app: call(app, path, body))
    assert reply.status == 200, reply.json
    return reply.json


def expected_text(models, name: str, prompt: list[int], limit: int, **options: Any) -> str:
    model = models.groups.prepare(models.groups.group_of(name), [name])
    served_model = models.by_name[name]
    tokens = generate(model, [prompt], max_new_tokens=limit, eos_token_id=served_model.eos_token_ids, **options)[0]
    tokenizer = served_model.tokenizer
    return tokenizer.decode(tokens, skip_special_tokens=True)


def chat_ids(models, text: str) -> list[int]:
    return models.by_name["base"].tokenizer(f"<|role|>user\n{text}<|end|>\n<|role|>assistant\n")["input_ids"]


def test_requests_for_all_models_at_once_get_each_models_own_answer(models):
    """Send chats and completions for the base and both adapters together, streamed and not."""
    requests, expected = [], []
    tokenizer = models.by_name["base"].tokenizer
    for name in models.by_name:
        for text in TEXTS:
            messages = [{"role": "user", "content": text}]
            requests.append((CHAT, {"model": name, "messages": messages, "max_tokens": 9, "temperature": 0}))
            expected.append(expected_text(models, name, chat_ids(models, text), 9))
            requests.append((COMPLETIONS, {"model": name, "prompt": text, "max_tokens": 7, "temperature": 0}))
            expected.append(expected_text(models, name, tokenizer(text)["input_ids"], 7))

    async def use(app):
        plain = asyncio.gather(*(call(app, path, body) for path, body in requests))
        streams = asyncio.gather(*(call(app, path, {**body, "stream": True}) for path, body in requests))
        return await plain, await streams

    replies, streams = served(models, use)
    choices = [reply.json["choices"][0] for reply in replies]
    assert [each["message"]["content"] if "message" in each else each["text"] for each in choices] == expected
    assert len(set(expected)) > len(expected) // 2
    for (path, _), reply, stream, text in zip(requests, replies, streams, expected, strict=True):
        parts = [event["choices"][0] for event in stream.events]
        found = [part["delta"].get("content", "") if path == CHAT else part["text"] for part in parts]
        assert "".join(found) == text
        assert parts[-1]["finish_reason"] == reply.json["choices"][0]["finish_reason"]
        if path == CHAT:
            assert parts[0]["delta"] == {"role": "assistant", "content": ""}


def test_completion_with_echo_returns_the_log_likelihood_of_a_direct_forward_pass(models):
    """Send prompts of token ids as lm-evaluation-harness does, and compare with the model's log-softmax."""
    prompts = [[72, 101, 108, 108, 111], [3, 250, 9]]
    body = {
        "model": "one",
        "prompt": prompts,
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 1,
        "echo": True,
        "seed": 1,
    }
    choices = answer(models, COMPLETIONS, body)["choices"]
    model = models.groups.prepare(models.groups.group_of("one"), ["one"])
    for prompt, choice in zip(prompts, choices, strict=True):
        with paddle.no_grad():
            lines = paddle.nn.functional.log_softmax(model(paddle.to_tensor([prompt]))[0], axis=-1).numpy()
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        values = [lines[index, token] for index, token in enumerate(prompt[1:])]
        np.testing.assert_allclose(found["token_logprobs"][1:-1], values, rtol=1e-4, atol=1e-5)
        best = [max(top.values()) for top in found["top_logprobs"][1:]]
        np.testing.assert_allclose(best, lines.max(axis=1), rtol=1e-4, atol=1e-5)
        assert len(found["tokens"]) == len(found["text_offset"]) == len(prompt) + 1
    only = answer(models, COMPLETIONS, {**body, "max_tokens": 0})
    assert [c["logprobs"]["token_logprobs"] for c in only["choices"]] == [
        c["logprobs"]["token_logprobs"][:-1] for c in choices
    ]
    assert only["usage"] == {"prompt_tokens": 8, "completion_tokens": 0, "total_tokens": 8}


def test_completion_logprobs_have_an_entry_for_the_end_token(models):
    """Score a prompt that the model ends: lm-evaluation-harness drops the last entry, that of the token after it."""
    prompt = models.by_name["base"].tokenizer("Hello")["input_ids"]
    body = {"model": "base", "prompt": prompt, "max_tokens": 1, "logprobs": 1, "echo": True, "logit_bias": {"256": 100}}
    reply = answer(models, COMPLETIONS, body)
    choice, usage = reply["choices"][0], reply["usage"]
    assert (choice["text"], choice["finish_reason"], usage["completion_tokens"]) == ("Hello", "stop", 0)
    assert choice["logprobs"]["tokens"] == [*"Hello", END]
    model = models.groups.prepare(models.groups.group_of("base"), ["base"])
    with paddle.no_grad():
        line = paddle.nn.functional.log_softmax(model(paddle.to_tensor([prompt]))[0, -1], axis=-1).numpy()
    np.testing.assert_allclose(choice["logprobs"]["token_logprobs"][-1], line[256], rtol=1e-4)
    events = served(models, lambda app: call(app, COMPLETIONS, {**body, "stream": True})).events
    streamed = [event["choices"][0]["logprobs"] for event in events]
    for name in ("tokens", "text_offset", "token_logprobs"):
        assert [value for part in streamed for value in part[name]] == choice["logprobs"][name]


def test_echo_precedes_the_answer_in_text_and_in_streams(models):
    body = {"model": "base", "prompt": ["ab", "c"], "max_tokens": 3, "temperature": 0, "n": 2}
    plain = [c["text"] for c in answer(models, COMPLETIONS, body)["choices"]]
    echoed = [c["text"] for c in answer(models, COMPLETIONS, {**body, "echo": True})["choices"]]
    assert echoed == [prefix + text for prefix, text in zip(("ab", "ab", "c", "c"), plain, strict=True)]
    for num_top in (None, 1):
        more = {"echo": True, "stream": True, "logprobs": num_top}
        events = served(models, lambda app, more=more: call(app, COMPLETIONS, {**body, **more})).events
        texts = ["", "", "", ""]
        for event in events:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert texts == echoed


def test_stop_text_across_tokens_ends_the_answer_before_it(models):
    """Stop at texts of several tokens, and hold back nothing that is not part of one."""
    body = {"model": "base", "prompt": "red", "max_tokens": 30, "temperature": 0, "logit_bias": {"256": -100}}
    free = answer(models, COMPLETIONS, body)["choices"][0]
    stop = free["text"][5:8]
    assert len(stop.encode()) >= 3
    stopped = answer(models, COMPLETIONS, {**body, "stop": ["never here", stop]})
    assert stopped["choices"][0]["text"] == free["text"][: free["text"].index(stop)]
    assert (free["finish_reason"], stopped["choices"][0]["finish_reason"]) == ("length", "stop")
    assert stopped["usage"]["completion_tokens"] < 30
    partial = answer(models, COMPLETIONS, {**body, "stop": free["text"][-2:] + "z"})
    assert partial["choices"][0] == {**free, "logprobs": None}


def test_seed_repeats_the_answers_and_each_of_n_differs(models):
    body = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "n": 3}

    def texts(**options):
        return [c["message"]["content"] for c in answer(models, CHAT, {**body, **options})["choices"]]

    first = texts(seed=5)
    assert len(set(first)) == 3 and texts(seed=5) == first and texts(seed=6) != first
    options = {"decode_strategy": "sampling", "seed": 5, "first_row": 1}
    assert first[1] == expected_text(models, "base", chat_ids(models, "hi"), 8, **options)


def test_tools_reach_the_template(models):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    body = {"model": "base", "messages": [{"role": "user", "content": "1+1"}], "max_tokens": 1, "tools": [tool]}
    with_tools = answer(models, CHAT, body)["usage"]["prompt_tokens"]
    without = answer(models, CHAT, {**body, "tool_choice": "none"})["usage"]["prompt_tokens"]
    assert with_tools > without + len('"name": "add"')


def test_chat_logprobs_and_usage_of_a_stream(models):
    body = {"model": "two", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
    body |= {"logprobs": True, "top_logprobs": 2}
    full = answer(models, CHAT, body)
    stream_options = {"stream": True, "stream_options": {"include_usage": True}}
    events = served(models, lambda app: call(app, CHAT, {**body, **stream_options})).events
    assert events[-1]["choices"] == [] and events[-1]["usage"] == full["usage"]
    entries = [entry for e in events[:-1] for entry in (e["choices"][0]["logprobs"] or {"content": []})["content"]]
    content = full["choices"][0]["logprobs"]["content"]
    assert [e["token"] for e in entries] == [e["token"] for e in content] and len(content) == 4
    assert all(len(e["top_logprobs"]) == 2 and e["top_logprobs"][0]["logprob"] >= e["logprob"] for e in content)


@pytest.mark.parametrize("is_stream", [False, True])
def test_client_that_leaves_frees_its_place(models, is_stream):
    """Fill the queue with answers of clients that leave; the next request is answered at once."""
    body = {"model": "base", "prompt": "a", "max_tokens": 200, "logit_bias": {"256": -100}, "stream": is_stream}

    async def use(app):
        leaving = [call(app, COMPLETIONS, body, leave_after=1 if is_stream else 0) for _ in range(6)]
        await asyncio.gather(*leaving)
        return await call(app, COMPLETIONS, {"model": "base", "prompt": "a", "max_tokens": 1})

    assert served(models, use, max_waiting=6).status == 200


def test_full_queue_time_limit_and_slow_body_are_errors_of_their_own(models):
    long = {"model": "base", "prompt": "a", "max_tokens": 200, "logit_bias": {"256": -100}}

    async def use(app):
        replies = await asyncio.gather(*(call(app, COMPLETIONS, {**long, "n": 4}) for _ in range(4)))
        slow = await call(app, COMPLETIONS, chunks=[b'{"model": "ba'], is_slow=True)
        return [reply.status for reply in replies], slow, await call(app, COMPLETIONS, {**long, "max_tokens": 1})

    limits = Limits(request_timeout=0.05, transfer_timeout=0.3)
    statuses, slow, after = served(models, use, limits, max_waiting=8)
    assert sorted(statuses)[:1] == [429] or 503 in statuses
    assert set(statuses) <= {429, 503} and {429, 503} == set(statuses)
    assert (slow.status, slow.headers["connection"]) == (408, "close")
    assert after.status == 200


def test_time_limit_of_a_stream_is_an_event(models):
    body = {"model": "base", "prompt": "a", "max_tokens": 200, "logit_bias": {"256": -100}, "stream": True}
    events = served(models, lambda app: call(app, COMPLETIONS, body), Limits(request_timeout=0.01)).events
    assert events[-1]["error"]["code"] == "timeout"


def test_failing_model_is_an_error_and_the_server_goes_on(models, monkeypatch):
    body = {"model": "base", "prompt": "a", "max_tokens": 2, "temperature": 0}

    async def use(app):
        with monkeypatch.context() as patched:
            patched.setattr(type(models.groups), "prepare", lambda *_: 1 / 0)
            failed = await call(app, COMPLETIONS, body)
        return failed, await call(app, COMPLETIONS, body)

    failed, after = served(models, use)
    assert (failed.status, failed.json["error"]["code"], after.status) == (500, "model_error", 200)


def test_defect_of_a_handler_is_an_error_in_the_form_of_all_others(models, monkeypatch):
    monkeypatch.setattr("paddlenlp_ext.serve.app.RunningRequest", lambda *_: 1 / 0)
    reply = served(models, lambda app: call(app, COMPLETIONS, {"model": "base", "prompt": "a"}))
    assert (reply.status, reply.json["error"]["code"]) == (500, "internal_error")
    assert isinstance(reply.defect, ZeroDivisionError)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "answer together is 512; shorten the prompt"),
        ({"prompt": [5] * 506, "max_tokens": 7}, "506 tokens and max_tokens is 7; the limit .* is 512; reduce one"),
    ],
)
def test_prompt_that_exceeds_the_context_is_an_error_with_the_numbers(models, body, message):
    path = CHAT if "messages" in body else COMPLETIONS
    error = served(models, lambda app: call(app, path, {"model": "base", **body})).json["error"]
    assert error["code"] == "context_length_exceeded" and re.search(message, error["message"])


@pytest.mark.parametrize(
    ("field", "value", "param", "code"),
    [
        ("temperature", 3, "temperature", "invalid_value"),
        ("temperature", "hot", "temperature", "invalid_type"),
        ("messages", None, "messages", "missing_required_parameter"),
        ("temperatur_", 1, "temperatur_", "unknown_parameter"),
    ],
)
def test_error_of_an_invalid_field_has_the_status_and_codes_of_openai(models, field, value, param, code):
    body = {"model": "base", "messages": [{"role": "user", "content": "x"}], field: value}
    reply = served(models, lambda app: call(app, CHAT, body))
    error = reply.json["error"]
    assert (reply.status, error["type"], error["param"], error["code"]) == (400, "invalid_request_error", param, code)
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            b'{"model": "a", "model": "b"}',
            "the body cannot be read: 1:1: duplicate key 'model'",
        ),
        (b'{"model": }', "the body is not JSON: "),
    ],
)
def test_parse_body_calls_only_broken_text_not_json(body, message):
    with pytest.raises(ApiError) as error:
        parse_body(body)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_content_part_that_is_not_text_is_refused_with_the_reason(models, kind):
    parts = [{"type": "text", "text": "look"}, {"type": kind, kind: {}}]
    body = {"model": "base", "messages": [{"role": "user", "content": parts}]}
    error = served(models, lambda app: call(app, CHAT, body)).json["error"]
    reason = f"the part has the type '{kind}'; the model reads text only, so send parts of type text"
    assert (error["param"], error["message"]) == ("messages.0.content.1", f"messages.0.content.1: {reason}")


def test_api_key_is_required_where_there_is_one(models):
    async def use(app):
        headers = ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer s3cret", "host": "example.org"})
        return [await call(app, "/v1/models", headers=each) for each in headers], await call(app, "/health")

    replies, health = served(models, use, api_key="s3cret")
    assert [reply.status for reply in replies] == [401, 401, 200]
    assert health.status == 200
    error = replies[0].json["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")


@pytest.mark.parametrize(
    ("host", "status"), [("localhost:1", 200), ("[::1]:80", 200), ("127.0.0.1", 200), ("evil.example", 403), ("", 403)]
)
def test_without_a_key_only_requests_to_this_computer_are_answered(models, host, status):
    assert served(models, lambda app: call(app, "/v1/models", headers={"host": host})).status == status


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_request_with_headers_beyond_the_limit_is_refused(models, path):
    reply = served(models, lambda app: call(app, path, headers={"x-long": "a" * 20_000}))
    assert (reply.status, reply.json["error"]["code"], reply.headers["connection"]) == (
        431,
        "headers_too_large",
        "close",
    )


def test_models_lists_base_and_adapters(models):
    async def use(app):
        return [await call(app, path) for path in ("/v1/models", "/v1/models/one", "/v1/models/none")]

    listed, one, missing = served(models, use)
    assert [(entry["id"], entry["parent"]) for entry in listed.json["data"]] == [
        ("base", None),
        ("one", "base"),
        ("two", "base"),
    ]
    assert one.json == listed.json["data"][1] and missing.status == 404
