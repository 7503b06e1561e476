"""Parse lists of messages in OpenAI's or sharegpt's format, with tools, tool calls and reasoning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from paddlenlp_ext.data.rows.checked_values import (
    MISSING_KEY,
    WRONG_TYPE,
    check_target,
    dotted,
    read_json,
    read_list,
    read_member,
    read_object,
    read_text,
    type_name,
)
from paddlenlp_ext.data.rows.conversation import ASSISTANT, ROLE_ORDER, SYSTEM, TOOL, USER, Message, ToolCall
from paddlenlp_ext.data.rows.errors import NOT_SUPPORTED, InvalidRowError
from paddlenlp_ext.data.rows.known_fields import (
    CALLS,
    NOTHING,
    REASONING,
    SHAREGPT,
    TOOLS,
    FieldPath,
    RowFormat,
    check_refusals,
)
from paddlenlp_ext.data.rows.loss_weights import check_no_weights, loss_weights

OPENAI_ROLES = {
    "system": SYSTEM,
    "developer": SYSTEM,
    "user": USER,
    "assistant": ASSISTANT,
    "tool": TOOL,
    "tool_response": TOOL,
    "function": TOOL,
    "tool_call": ASSISTANT,
}
SHAREGPT_ROLES = {
    "system": SYSTEM,
    "human": USER,
    "user": USER,
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "function_call": ASSISTANT,
    "tool_call": ASSISTANT,
    "observation": TOOL,
    "tool": TOOL,
    "tool_response": TOOL,
}
CALL_ROLES = ("function_call", "tool_call")
"""Roles of messages whose content is a tool call, or a list of tool calls, as JSON."""
THINK_TAGS = ("<think>", "</think>")


def read_messages(items: Any, path: FieldPath, row_format: RowFormat) -> list[Message]:
    """Parse a list of messages; answers contribute to the loss unless their loss weight is 0.

    A tool-call message without reasoning is merged into the answer before it, if both have the same loss weight.

    Raises:
        InvalidRowError: a message has the wrong type or role, an empty answer, or a field that is not supported.
    """
    roles = SHAREGPT_ROLES if row_format is SHAREGPT else OPENAI_ROLES
    messages: list[Message] = []
    joinable = False
    for index, item in enumerate(read_list(items, path)):
        message = _read_message(item, (*path, index), row_format, roles)
        calls_only = _role_of(item, row_format) in CALL_ROLES
        if calls_only and joinable and messages[-1].is_target == message.is_target and message.reasoning is None:
            messages[-1] = replace(messages[-1], tool_calls=messages[-1].tool_calls + message.tool_calls)
        else:
            messages.append(message)
        joinable = message.is_answer
    return messages


def read_tools(row: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the tool specifications of a row in OpenAI's form.

    The field `tools` or `functions` holds the specifications as a list or as JSON text.

    Raises:
        InvalidRowError: a specification has no name or the wrong type, or the row has both `tools` and `functions`.
    """
    given = [name for name in TOOLS if row.get(name) not in NOTHING]
    if len(given) > 1:
        raise InvalidRowError(NOT_SUPPORTED, "the row has tools and functions; keep one", ("functions",))
    if not given:
        return ()
    field: FieldPath = (given[0],)
    # Values inside a JSON string cannot be located separately.
    is_text = isinstance(row[given[0]], str)
    tools = []
    for index, tool in enumerate(read_list(read_json(row[given[0]], field), field)):
        path = field if is_text else (*field, index)
        specification = read_object(tool, path)
        if "function" not in specification:
            specification = {"type": "function", "function": specification}
        read_text(read_member(read_object(specification["function"], path), "name", path), path)
        tools.append(specification)
    return tuple(tools)


def _role_of(item: Any, row_format: RowFormat) -> Any:
    return item.get(row_format.message[0]) if isinstance(item, dict) else None


def _read_message(item: Any, path: FieldPath, row_format: RowFormat, roles: dict[str, str]) -> Message:
    role_key, content_key = row_format.message[:2]
    check_refusals(item if isinstance(item, dict) else {}, path, row_format.message)
    written = read_member(item, role_key, path)
    role = roles.get(written) if isinstance(written, str) else None
    weights = loss_weights(item, path)
    if role is None:
        raise InvalidRowError(ROLE_ORDER, f"role {written!r} is unknown; use {', '.join(roles)}", path)
    if role != ASSISTANT:
        _check_context(item, role, weights, path)
    calls = list(_read_calls(item, path))
    if content_key not in item and calls:
        content, reasoning = "", None
    else:
        content_path = (*path, content_key)
        value = read_member(item, content_key, path)
        if value is None and calls:
            value = ""
        content, reasoning, more = _read_content(value, content_path, role == ASSISTANT)
        calls += more
        if written in CALL_ROLES:
            content, reasoning, more = _call_message(content, content_path)
            calls += more
    reasoning = _read_reasoning(item, reasoning, path)
    if role == ASSISTANT and not calls:
        check_target(content, (*path, content_key))
    return Message(
        role=role,
        content=content,
        reasoning=reasoning,
        tool_calls=tuple(calls),
        name=_optional_text(item, "name", path),
        call_id=_optional_text(item, "tool_call_id", path),
        is_target=role == ASSISTANT and False not in weights.values(),
        path=path,
    )


def _check_context(item: dict[str, Any], role: str, weights: dict[str, bool], path: FieldPath) -> None:
    """Check that a message other than an answer has no loss weight of 1, no reasoning and no tool calls."""
    for name, is_target in weights.items():
        if is_target:
            problem = (
                f"{name} makes a {role} message a target, but only assistant messages can be targets; remove the field"
            )
            raise InvalidRowError(NOT_SUPPORTED, problem, (*path, name))
    for name in (*REASONING, *CALLS):
        if item.get(name) not in NOTHING:
            problem = (
                f"{name} is in a {role} message, but only assistant messages may have this field; remove the field"
            )
            raise InvalidRowError(NOT_SUPPORTED, problem, (*path, name))


def _read_reasoning(item: dict[str, Any], from_parts: str | None, path: FieldPath) -> str | None:
    """Return the reasoning of an answer from its fields or from its content parts (`from_parts`)."""
    found, place = from_parts, "the content"
    for name in REASONING:
        if item.get(name) in NOTHING:
            continue
        text = read_text(item[name], (*path, name))
        if found not in (None, text):
            message = f"{name} differs from the reasoning in {place}; keep one of the two"
            raise InvalidRowError(NOT_SUPPORTED, message, (*path, name))
        found, place = text, name
    return found


def _read_calls(item: dict[str, Any], path: FieldPath) -> Iterator[ToolCall]:
    """Yield the tool calls in `tool_calls` and `function_call`."""
    if item.get("tool_calls") not in NOTHING:
        field = (*path, "tool_calls")
        value = read_json(item["tool_calls"], field)
        for index, call in enumerate(read_list(value, field)):
            yield _read_call(call, field if isinstance(item["tool_calls"], str) else (*field, index))
    if item.get("function_call") not in NOTHING:
        field = (*path, "function_call")
        yield _read_call(read_json(item["function_call"], field), field)


def _read_call(call: Any, path: FieldPath) -> ToolCall:
    """Parse a tool call in OpenAI's form, or an object with `name` and `arguments` (or `parameters`)."""
    specification = read_object(call, path)
    call_id = specification.get("id")
    if "function" in specification:
        specification = read_object(specification["function"], path)
    name = read_text(read_member(specification, "name", path), path)
    given = [key for key in ("arguments", "parameters") if key in specification]
    if not given:
        raise InvalidRowError(MISSING_KEY, f"{dotted(path)} calls {name} without 'arguments'; add {{}}", path)
    arguments = specification[given[0]]
    arguments = {} if arguments in ("", None) else read_json(arguments, path)
    if not isinstance(arguments, dict):
        message = f"the arguments of {name} are {type_name(arguments)}; write an object"
        raise InvalidRowError(WRONG_TYPE, message, path)
    return ToolCall(name, arguments, None if call_id is None else read_text(call_id, path))


def _call_message(text: str, path: FieldPath) -> tuple[str, str | None, list[ToolCall]]:
    """Return the content, reasoning and tool calls of a message with optional reasoning followed by JSON."""
    thought, rest = split_reasoning(text)
    value = read_json(rest, path)
    calls = value if isinstance(value, list) else [value]
    return "", thought, [_read_call(call, path) for call in calls]


def split_reasoning(text: str) -> tuple[str | None, str]:
    """Split a text into the reasoning in `<think>` tags at its start (None if there is none) and the remaining text."""
    opening, closing = THINK_TAGS
    stripped = text.lstrip()
    if not stripped.startswith(opening) or closing not in stripped:
        return None, text
    thought, _, rest = stripped.removeprefix(opening).partition(closing)
    return thought.strip("\n"), rest.lstrip("\n")


def _read_content(value: Any, path: FieldPath, is_answer: bool) -> tuple[str, str | None, list[ToolCall]]:
    """Return the text, the reasoning and the tool calls in `content`, which is a string or a list of content parts."""
    if not isinstance(value, list):
        return read_text(value, path), None, []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, part in enumerate(value):
        part_path = (*path, index)
        kind = part.get("type") if isinstance(part, dict) else None
        allowed = ("text", "reasoning", "thinking", "tool_call") if is_answer else ("text",)
        if not isinstance(kind, str) or kind not in allowed:
            remedy = (
                "only assistant messages may have this type"
                if kind in ("reasoning", "thinking", "tool_call")
                else _remedy(kind)
            )
            raise InvalidRowError(WRONG_TYPE, f'the part is of type {kind!r}, not "text"; {remedy}', part_path)
        check_refusals(part, part_path, (kind,))
        check_no_weights(part, part_path)
        text = _read_part(part, kind, part_path)
        if kind == "tool_call":
            calls.append(_read_call(read_json(text, part_path), part_path))
        else:
            (texts if kind == "text" else thoughts).append(text)
    return "".join(texts), "".join(thoughts) if thoughts else None, calls


def _remedy(kind: Any) -> str:
    if kind == "refusal":
        return "write the refusal as text"
    return "only text can be trained on" if isinstance(kind, str) else "write a text"


def _read_part(part: dict[str, Any], kind: str, path: FieldPath) -> str:
    names: Sequence[str] = ("text", "value") if kind == "text" else ("text", "value", kind)
    present = [name for name in names if part.get(name) is not None]
    if len(present) > 1:
        named = " and ".join(f'"{name}"' for name in present)
        raise InvalidRowError(NOT_SUPPORTED, f"the part has {named}; keep one", (*path, present[1]))
    key = present[0] if present else "text"
    return read_text(read_member(part, key, path), (*path, key))


def _optional_text(item: dict[str, Any], key: str, path: FieldPath) -> str | None:
    value = item.get(key)
    return None if value in (None, "") else read_text(value, (*path, key))
