"""Chats in OpenAI's form for Ollama's templates, and the chat templates that become templates of Ollama."""

from __future__ import annotations

from typing import Any

_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Get the {name}.", "parameters": _PARAMETERS}}
    for name in ("weather", "time")
]
_SYSTEM = {"role": "system", "content": 'Answer in "one" word.'}
_ASKED = {"role": "user", "content": "How warm is it in Paris?"}
_NEXT = {"role": "user", "content": "And in {{ Rome }}?"}
_ANSWER = {"role": "assistant", "content": "Mild."}
_RESULTS = [{"role": "tool", "content": '{"celsius": 15}'}, {"role": "tool", "content": 'It is "noon".'}]


def _called(*names: str, content: str = "") -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": name, "arguments": {"city": "Paris"}}} for name in names]
    return {"role": "assistant", "content": content, "tool_calls": calls}


_ONE_CALL = [_ASKED, _called("weather"), _RESULTS[0]]
_TURNS = {
    "question": [_ASKED],
    "answered": [_ASKED, _ANSWER, _NEXT],
    "result": _ONE_CALL,
    "answered_result": [*_ONE_CALL, _ANSWER, _NEXT],
    "call_after_text": [_ASKED, _called("time", content="I look."), _RESULTS[1], _ANSWER, _NEXT],
    "two_results": [*_ONE_CALL, _RESULTS[1]],
    "two_calls": [_ASKED, _called("weather", "time"), *_RESULTS, _ANSWER, _NEXT],
}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [_SYSTEM, _ASKED, _ANSWER, _NEXT], "tools": []},
    **{name: {"messages": messages, "tools": _TOOLS} for name, messages in _TURNS.items()},
    **{f"{name}_with_system": {"messages": [_SYSTEM, *turns], "tools": _TOOLS} for name, turns in _TURNS.items()},
}
_REJECTED = tuple(f"{name}{end}" for name in ("two_calls", "call_after_text") for end in ("", "_with_system"))
TEMPLATES: dict[str, tuple[str, ...]] = {"qwen2_5": (), "qwen3": (), "llama3_2": _REJECTED}
"""Chat template -> chats that it rejects."""
