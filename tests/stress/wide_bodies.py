"""Bodies of requests with a great many entries in one field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_TOOL = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}
_CALL = {"type": "function", "id": "1", "function": {"name": "a", "arguments": "{}"}}


def wide_bodies(model: str, count: int) -> Iterator[tuple[str, str, bytes]]:
    """Yield name, path and body of a request for each field; the field has `count` entries."""
    user = {"role": "user", "content": "a"}
    chat = {"model": model, "max_tokens": 1, "messages": [user]}
    completion = {"model": model, "max_tokens": 1, "prompt": "a"}
    for name, fields in _chat_fields(user, count).items():
        yield f"chat {name}", CHAT, json.dumps({**chat, **fields}).encode()
    for name, value in _prompts(count).items():
        yield f"completion {name}", COMPLETIONS, json.dumps({**completion, "prompt": value}).encode()
    for name, value in _common_fields(count).items():
        for path, body in ((CHAT, chat), (COMPLETIONS, completion)):
            yield f"{path} {name}", path, json.dumps({**body, name: value}).encode()
    names = ", ".join(f'"{index}": 0' for index in range(count))
    yield "unknown fields", CHAT, f"{{{names}}}".encode()
    yield "a field written twice", CHAT, f'{{{names}, "{count - 1}": 0}}'.encode()
    yield "nested lists", CHAT, b"[" * count
    yield "nested objects", CHAT, b'{"a":' * count


def _chat_fields(user: dict[str, Any], count: int) -> dict[str, dict[str, Any]]:
    answer, system = {"role": "assistant", "content": "a"}, {"role": "system", "content": "a"}
    result = {"role": "tool", "tool_call_id": "1", "content": "a"}
    called = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    return {
        "user messages": {"messages": [user] * count},
        "system messages": {"messages": [system] * (count - 1) + [user]},
        "turns": {"messages": [user, answer] * (count // 2) + [user]},
        "tool results": {"messages": [user, called, *[result] * (count - 2)]},
        "tool calls": {"messages": [user, {**called, "tool_calls": [_CALL] * count}, user]},
        "content parts": {"messages": [{**user, "content": [{"type": "text", "text": "a"}] * count}]},
        "keys of a message": {"messages": [user | {str(index): 0 for index in range(count)}]},
        "long content": {"messages": [{**user, "content": "a b" * count}]},
        "same character": {"messages": [{**user, "content": "a" * count}]},
        "tools": {"tools": [_TOOL] * count},
        "properties of a tool": {
            "tools": [{**_TOOL, "function": {"name": "a", "parameters": {str(i): {} for i in range(count)}}}]
        },
        "template variables": {"chat_template_kwargs": {str(index): 0 for index in range(count)}},
        "value of a template variable": {"chat_template_kwargs": {"documents": ["a"] * count}},
    }


def _prompts(count: int) -> dict[str, Any]:
    return {
        "texts": ["a"] * count,
        "token ids": [1] * count,
        "lists of token ids": [[1]] * count,
        "mixed values": [[1], "a"] * (count // 2),
        "long text": "a b" * count,
        "one character": "a" * count,
    }


def _common_fields(count: int) -> dict[str, Any]:
    texts, numbers = [str(index) for index in range(count)], {str(index): 1 for index in range(count)}
    return {
        "stop": texts,
        "logit_bias": numbers,
        "metadata": numbers,
        "user": "a" * count,
        "model": "a" * count,
        "stream_options": numbers,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"properties": numbers}}},
        "tool_choice": numbers,
        "modalities": texts,
        "functions": texts,
        "seed": texts,
        "temperature": numbers,
    }
