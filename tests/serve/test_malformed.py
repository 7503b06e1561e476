"""About 250 kinds of bad requests: each gets a clear error in OpenAI's form, and the server goes on."""

from __future__ import annotations

import asyncio
import json

from paddlenlp_ext.serve.app import Limits
from tests.serve.asgi import call
from tests.serve.tiny_server import served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
GOOD = {
    CHAT: {"model": "base", "messages": MESSAGES, "max_tokens": 1},
    COMPLETIONS: {"model": "base", "prompt": "hi", "max_tokens": 1},
}
OF_WRONG_TYPE = ("text", [], {}, [1], {"a": 1}, True)
NUMBERS = {
    "temperature": (-1, 3, 1e308),
    "top_p": (-0.1, 1.1),
    "frequency_penalty": (-3, 3),
    "presence_penalty": (-3, 3),
    "repetition_penalty": (0, -1, 1e9),
    "top_k": (-1, 1.5),
    "n": (0, -1, 1.5, 129, 10**30),
    "seed": (-1, 1.5, 10**200),
    "max_tokens": (-1, 0.5, 10**12),
}
VALUES = {
    "stop": (1, True, {}, "", ["a", ""], [1], [None], ["a"] * 17, "a" * 2000, "\ud800"),
    "stream": (1, "true", [], {}),
    "stream_options": ({"include_usage": True}, "x", [], 1),
    "logit_bias": ("x", [1], {"a": 1}, {"-1": 1}, {"1": 101}, {"1": "x"}, {"300": 1}, {"1.5": 1}, {"9" * 40: 1}),
    "model": (1, [], {}, True, "\udfff"),
    "response_format": (
        *("json", 1, {}, {"type": "yaml"}, {"type": 1}, {"type": "json_schema"}, {"type": "json_object", "a": 1}),
        {"type": "json_object", "json_schema": {"schema": {}}},
        *({"type": "json_schema", "json_schema": each} for each in (1, {}, {"name": "a"}, {"name": 1, "schema": {}})),
        *({"type": "json_schema", "json_schema": {"schema": each}} for each in (1, True, {"type": "x"}, {"$ref": "#"})),
        {"type": "json_schema", "json_schema": {"schema": {"const": "\ud800"}}},
    ),
    "structured_outputs": (
        *(1, {}, {"json": 1}, {"regex": 1}, {"regex": "("}, {"choice": []}, {"choice": ["a", 1]}, {"grammar": "x"}),
        {"regex": "a", "choice": ["a"]},
    ),
    "guided_json": ("x", 1, [], {"type": "x"}),
    "guided_regex": (1, [], "(?=a)", "a{2,1}", "\ud800"),
    "guided_choice": ("x", [], [1]),
    "functions": ([{"name": "a"}], "x"),
    "service_tier": ("flex", 1),
    "store": (True, "x"),
    "suffix": ("x", 1),
    "reasoning_effort": ("low",),
    "unknown": (1, "x", [], False),
    "temperatur_": (0.5,),
}
OF_PATH = {
    CHAT: {
        "logprobs": (1, "true", []),
        "top_logprobs": (1, -1, 21, "x"),
        "max_completion_tokens": (0, -1, 2, "x", 1.5),
        "tool_choice": (
            *("required", {"type": "function", "function": {"name": "a"}}, 1, [], "any", {}, {"type": "x"}),
            *({"type": "function"}, {"type": "function", "function": {"name": 1}}, {"type": "allowed_tools"}),
        ),
        "tools": ("x", {"a": 1}, [1], [{}], [{"type": "function"}], [{"type": "function", "function": {}}]),
        "parallel_tool_calls": (1, "x"),
        "chat_template_kwargs": (1, "x", [1], {"no_such_variable": 1}),
        "echo": (True,),
        "prompt": ("x",),
        "messages": (
            *("x", 1, {}, [], [1], ["x"], [None], [[]], [{}], [{"role": "user"}], [{"content": "x"}]),
            *([{"role": role, "content": "x"}] for role in ("", "wizard", 1, None, [], {}, "assistant", "system")),
            *([{"role": "user", "content": content}] for content in (1, None, {}, [1], [{}], [{"type": "text"}])),
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
            [{"role": "user", "content": "\ud800"}],
            [{"role": "user", "content": "x", "\ud800": 1}],
            [{"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}],
            [{"role": "assistant", "content": "x", "tool_calls": [{}]}, *MESSAGES],
            [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}, *MESSAGES],
            [*MESSAGES, {"role": "assistant", "content": "x"}],
            [{"role": "user", "content": "long " * 200}],
        ),
    },
    COMPLETIONS: {
        "logprobs": (-1, 21, "x", True, 1.5),
        "best_of": (2, 0, "x"),
        "echo": (1, "x"),
        "messages": (MESSAGES,),
        "prompt": (
            *(1, True, {}, [], [[]], [""], [None], [1.5], [True], [[1], [1.5]], [[1], [None]], [{}], ["a", 1], [-1]),
            *([300], [10**30], [[1, 2], [10**30]], "\udc00", ["\udc00"], "x" * 600, [1] * 600, ["a"] * 65),
        ),
        "max_tokens": (0, 600),
    },
}
BODIES = {
    b"": 400,
    b" ": 400,
    b"{": 400,
    b"}": 400,
    b"null": 400,
    b"[]": 400,
    b'"x"': 400,
    b"1": 400,
    b"{'a': 1}": 400,
    b'{"a": 1,}': 400,
    b'{"a": NaN}': 400,
    b'{"a": Infinity}': 400,
    b'{"a": 1, "a": 2}': 400,
    b'{"a": 1} x': 400,
    b'{"a": ' + b"9" * 5000 + b"}": 400,
    b"\xff\xfe": 400,
    b'{"a": "\xc3"}': 400,
    b"[" * 30000: 400,
    b'{"a":' * 5000: 400,
    b"\x00" * 100: 400,
    b"PK\x03\x04": 400,
    b"model=base&prompt=x": 400,
    b"x" * 40000: 413,
    b'{"prompt": "' + b"x" * 40000 + b'"}': 413,
}


def bad_requests():
    """Yield (path, arguments of `call`, statuses) of every kind."""
    for path, good in GOOD.items():
        for name in ("model", "messages" if path == CHAT else "prompt"):
            yield path, {"body": {key: value for key, value in good.items() if key != name}}, {400}
        for name, values in {**NUMBERS, **VALUES, **OF_PATH[path]}.items():
            wrong = OF_WRONG_TYPE if name in NUMBERS else ()
            for value in (*values, *wrong):
                yield path, {"body": {**good, name: value}}, {400}
        for body, status in BODIES.items():
            yield path, {"body": body}, {status}
        for kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/xml"):
            yield path, {"body": good, "headers": {"content-type": kind}}, {415}
        for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
            yield path, {"method": method}, {405}
        yield path, {"body": {**good, "model": "nobody"}}, {404}
        yield path, {"body": good, "headers": {"content-length": "99999999"}}, {413}
        yield path, {"chunks": [b"x" * 9000] * 9}, {413}
    for path in ("/", "/v1", "/v1/chat", "/v1/embeddings", "/v1/models/none", "/%00", "/../etc/passwd", "//"):
        yield path, {}, {404}


def test_every_kind_of_bad_request_is_a_clear_error_and_leaves_the_server_answering(models):
    kinds = list(bad_requests())
    assert len(kinds) >= 200

    async def use(app):
        replies = []
        for path, arguments, _ in kinds:
            replies.append(await asyncio.wait_for(call(app, path, **arguments), 20))
        return replies, [await call(app, path, body) for path, body in GOOD.items()]

    replies, good = served(models, use, Limits(max_body_bytes=32768))
    problems = []
    for (path, arguments, statuses), reply in zip(kinds, replies, strict=True):
        if not _is_clear(reply, arguments.get("body"), statuses):
            problems.append(f"{path} {str(arguments)[:200]}: {reply.status} {b''.join(reply.parts)[:300]!r}")
    assert not problems, "\n".join(problems)
    assert [reply.status for reply in good] == [200, 200]


def _is_clear(reply, body, statuses) -> bool:
    """Return whether a reply is an error with one of the statuses, in OpenAI's form; empty values mean nothing."""
    if reply.status == 200:
        return isinstance(body, dict) and any(value in ([], {}) for value in body.values())
    error = json.loads(b"".join(reply.parts))["error"]
    has_form = set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    return reply.status in statuses and has_form and 10 < len(error["message"]) < 700 and bool(error["code"])
