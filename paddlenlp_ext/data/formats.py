"""Parsers of the formats of a row, each of which returns a `Conversation`.

The keys of a row select its format. `row_fields` lists the known fields and their effects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from paddlenlp_ext.data.row_fields import (
    ADVERTISE_GEN,
    ALPACA,
    MESSAGES,
    NO_TARGET,
    NOT_SUPPORTED,
    NOTHING,
    PROMPT,
    QUERY,
    SHAREGPT,
    SRC_TGT,
    FieldPath,
    RowFormat,
    check_no_weights,
    check_refusals,
    check_row_weights,
    check_texts,
    context_turns,
    loss_weights,
)
from paddlenlp_ext.data.types import Conversation, InvalidRowError

KNOWN_FORMATS = (
    '{"src", "tgt"}, {"messages"}, {"instruction", "output"} (alpaca), {"conversations"} (sharegpt), '
    '{"query", "response"}, {"prompt", "completion"}, {"content", "summary"} (AdvertiseGen), '
    'each with an optional system prompt in "context" or "system"'
)
WRONG_TYPE = "wrong type"
MISSING_KEY = "missing key"
UNKNOWN_FORMAT = "unknown format"
EMPTY_TARGET = "empty target"
UNEQUAL_LISTS = "unequal lists"
ROLE_ORDER = "role order"
TWO_SYSTEMS = "two system prompts"
TOOL_ROLES = ("tool", "tool_call", "tool_response", "function", "function_call", "observation")
PART_REMEDIES = {
    "reasoning": "reasoning is not supported yet; write it into the answer, as the chat template does",
    "thinking": "reasoning is not supported yet; write it into the answer, as the chat template does",
    "tool_call": "tool calls are not supported yet; remove the row",
    "tool_calls": "tool calls are not supported yet; remove the row",
    "refusal": "write the refusal as text",
}
"""Type of a content part that is not supported -> end of the error message."""


class Message(NamedTuple):
    """Message of a conversation.

    Attributes:
        role: role as the row writes it.
        text: content of the message.
        path: path of the content in the row.
        weights: the message's loss weights, from `loss_weights`.
    """

    role: str
    text: str
    path: FieldPath
    weights: dict[str, bool]


def parse_row(value: Any) -> Conversation:
    """Return the conversation in a row of any known format.

    Raises:
        InvalidRowError: the row matches no format or two formats, or a part is missing, empty or of the wrong type.
    """
    if not isinstance(value, dict):
        raise InvalidRowError(WRONG_TYPE, f"the row is {_type_name(value)}; write a JSON object")
    check_refusals(value, turn_labels=not SRC_TGT.missing(value))
    check_row_weights(value)
    complete = [row_format for row_format in _PARSERS if not row_format.missing(value)]
    if len(complete) > 1:
        named = " and ".join(row_format.name for row_format in complete)
        raise InvalidRowError(UNKNOWN_FORMAT, f"the row has the keys of two formats: {named}; keep one")
    if not complete:
        raise _no_format(value)
    check_texts(value, complete[0])
    conversation = _PARSERS[complete[0]](value)
    if not conversation.turns:
        raise InvalidRowError(EMPTY_TARGET, "the conversation has no turns; add a question and an answer")
    if len(conversation.context_turns) == len(conversation.turns):
        raise InvalidRowError(NO_TARGET, "every answer has weight 0, so the row has no target; remove the row")
    return replace(conversation, system=_choose_system(conversation.system, value))


def parse_text(value: Any) -> str:
    """Return the plain text of a row, for `autoregressive`: its `src` (lists are joined) or its `text`.

    Raises:
        InvalidRowError: both keys are missing, the text is empty or of the wrong type, or a field makes the row
            invalid.
    """
    if not isinstance(value, dict):
        raise InvalidRowError(WRONG_TYPE, f"the row is {_type_name(value)}; write a JSON object")
    check_refusals(value)
    check_row_weights(value)
    key = "src" if "src" in value else "text"
    if key not in value:
        raise InvalidRowError(MISSING_KEY, f'the row has {_describe_keys(value)}; autoregressive needs "src" or "text"')
    text = "".join(_texts(value[key], (key,)))
    if not text.strip():
        raise InvalidRowError(EMPTY_TARGET, f"{key!r} is empty; add text or remove the row", (key,))
    return text


def _parse_src_tgt(row: dict[str, Any]) -> Conversation:
    sources, targets = _texts(row["src"], ("src",)), _texts(row["tgt"], ("tgt",))
    if len(sources) != len(targets):
        message = f"src has {len(sources)} items and tgt {len(targets)}; turn i is src[i], tgt[i]"
        raise InvalidRowError(UNEQUAL_LISTS, message, ("tgt",))
    for index, target in enumerate(targets):
        _check_target(target, ("tgt", index) if isinstance(row["tgt"], list) else ("tgt",))
    return Conversation(None, tuple(zip(sources, targets, strict=True)), context_turns(row.get("label"), len(targets)))


_OPENAI_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def _parse_messages(row: dict[str, Any]) -> Conversation:
    return _alternate(_read_messages(row["messages"], ("messages",), MESSAGES, _content), _OPENAI_ROLES)


def _parse_prompt(row: dict[str, Any]) -> Conversation:
    """Return the turns of two texts, or of two lists of messages.

    Answers in the prompt are context, unless their weight is 1.
    """
    if not isinstance(row["prompt"], list):
        return Conversation(None, (_turn(row, "prompt", "completion"),))
    given = _read_messages(row["prompt"], ("prompt",), PROMPT, _content)
    messages = [*given, *_read_messages(row["completion"], ("completion",), PROMPT, _content)]
    conversation = _alternate(messages, _OPENAI_ROLES)
    answers = [message for message in given if message.role == "assistant"]
    context = {index for index, answer in enumerate(answers) if True not in answer.weights.values()}
    return replace(conversation, context_turns=conversation.context_turns | context)


def _parse_sharegpt(row: dict[str, Any]) -> Conversation:
    messages = _read_messages(row["conversations"], ("conversations",), SHAREGPT, _text)
    roles = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
    return _alternate(messages, roles)


def _read_messages(
    items: Any, path: FieldPath, row_format: RowFormat, read_content: Callable[[Any, FieldPath], str]
) -> list[Message]:
    role_key, content_key = row_format.message
    messages = []
    for index, item in enumerate(_list(items, path)):
        item_path = (*path, index)
        check_refusals(item if isinstance(item, dict) else {}, item_path)
        role = _member(item, role_key, item_path)
        content_path = (*item_path, content_key)
        text = read_content(_member(item, content_key, item_path), content_path)
        messages.append(Message(role, text, content_path, loss_weights(item, item_path)))
    return messages


def _parse_alpaca(row: dict[str, Any]) -> Conversation:
    turns = _history(row)
    present = [name for name in ("instruction", "input") if row.get(name) is not None] or ["instruction"]
    parts = [_text(row.get(name), (name,)) for name in present]
    output = _text(row["output"], ("output",))
    _check_target(output, ("output",))
    turns.append(("\n".join(part for part in parts if part), output))
    return Conversation(None, tuple(turns))


def _parse_query(row: dict[str, Any]) -> Conversation:
    return Conversation(None, (*_history(row), _turn(row, "query", "response")))


def _parse_advertise_gen(row: dict[str, Any]) -> Conversation:
    return Conversation(None, (_turn(row, "content", "summary"),))


def _turn(row: dict[str, Any], question_key: str, answer_key: str) -> tuple[str, str]:
    question, answer = _text(row[question_key], (question_key,)), _text(row[answer_key], (answer_key,))
    _check_target(answer, (answer_key,))
    return question, answer


def _history(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the turns in the row's `history`."""
    turns = []
    for index, pair in enumerate(_list(row.get("history") or [], ("history",))):
        path = ("history", index)
        if not isinstance(pair, list) or len(pair) != 2:
            raise InvalidRowError(
                WRONG_TYPE, f"a turn of history is {_type_name(pair)}; write [question, answer]", path
            )
        question, answer = _text(pair[0], (*path, 0)), _text(pair[1], (*path, 1))
        _check_target(answer, (*path, 1))
        turns.append((question, answer))
    return turns


_PARSERS: dict[RowFormat, Callable[[dict[str, Any]], Conversation]] = {
    SRC_TGT: _parse_src_tgt,
    MESSAGES: _parse_messages,
    SHAREGPT: _parse_sharegpt,
    ALPACA: _parse_alpaca,
    QUERY: _parse_query,
    PROMPT: _parse_prompt,
    ADVERTISE_GEN: _parse_advertise_gen,
}


def _alternate(messages: Sequence[Message], roles: dict[str, str]) -> Conversation:
    """Return the turns of messages: an optional system prompt, then user and assistant alternately, an answer last."""
    system: str | None = None
    turns: list[tuple[str, str]] = []
    context_turns: set[int] = set()
    question: str | None = None
    for index, message in enumerate(messages):
        path = message.path[:-1]
        role = roles.get(message.role) if isinstance(message.role, str) else None
        if message.role in TOOL_ROLES:
            problem = f"role {message.role!r} belongs to tool calls, which are not supported yet; remove the row"
            raise InvalidRowError(ROLE_ORDER, problem, path)
        if role is None:
            raise InvalidRowError(ROLE_ORDER, f"role {message.role!r} is unknown; use {', '.join(roles)}", path)
        if role != "assistant":
            _check_context(message)
        if role == "system":
            if index:
                raise InvalidRowError(
                    ROLE_ORDER, "a system message follows another message; move it to the beginning", path
                )
            system = message.text
        elif role == "user":
            if question is not None:
                raise InvalidRowError(
                    ROLE_ORDER, "a user message follows a user message; add the answer, or join them", path
                )
            question = message.text
        else:
            if question is None:
                raise InvalidRowError(
                    ROLE_ORDER, "an assistant message has no user message before it; add the question", path
                )
            _check_target(message.text, message.path)
            if False in message.weights.values():
                context_turns.add(len(turns))
            turns.append((question, message.text))
            question = None
    if question is not None:
        raise InvalidRowError(ROLE_ORDER, "the last message is a user message; add its answer", messages[-1].path[:-1])
    return Conversation(system, tuple(turns), frozenset(context_turns))


def _check_context(message: Message) -> None:
    for name, is_target in message.weights.items():
        if is_target:
            problem = f"{name} makes a {message.role} message a target, but only answers can be targets; remove it"
            raise InvalidRowError(NOT_SUPPORTED, problem, (*message.path[:-1], name))


def _content(value: Any, path: FieldPath) -> str:
    """Return the text of OpenAI content: a string, or a list of parts of type "text", with "text" or "value"."""
    if not isinstance(value, list):
        return _text(value, path)
    texts = []
    for index, part in enumerate(value):
        part_path = (*path, index)
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            remedy = PART_REMEDIES.get(kind, "only text can be trained on") if isinstance(kind, str) else "write a text"
            raise InvalidRowError(WRONG_TYPE, f'the part is of type {kind!r}, not "text"; {remedy}', part_path)
        check_refusals(part, part_path)
        check_no_weights(part, part_path)
        present = [name for name in ("text", "value") if part.get(name) is not None]
        if len(present) > 1:
            raise InvalidRowError(NOT_SUPPORTED, 'the part has "text" and "value"; keep one', (*part_path, "value"))
        key = present[0] if present else "text"
        texts.append(_text(_member(part, key, part_path), (*part_path, key)))
    return "".join(texts)


def _choose_system(from_messages: str | None, row: dict[str, Any]) -> str | None:
    """Return the system prompt from a system message, the row's `system`, or `system` in its `context`.

    In `system` and `context`, null and the empty string both mean no system prompt.
    """
    chosen = from_messages
    for holder, path in ((row, ("system",)), (_context(row), ("context", "system"))):
        if holder.get("system") is None:
            continue
        text = _text(holder["system"], path)
        if text and chosen not in (None, text):
            raise InvalidRowError(
                TWO_SYSTEMS, f"{_dotted(path)} differs from the system prompt before it; keep one", path
            )
        chosen = chosen if chosen is not None else text or None
    return chosen


def _context(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row's `context`, which may hold only the system prompt."""
    context = row.get("context")
    if context in NOTHING:
        return {}
    if not isinstance(context, dict):
        raise InvalidRowError(
            WRONG_TYPE, f'context is {_type_name(context)}; write an object such as {{"system": ...}}', ("context",)
        )
    unknown = sorted(set(context) - {"system"})
    if unknown:
        message = f'context may only hold "system"; remove {", ".join(map(repr, unknown))}, which would have no effect'
        raise InvalidRowError(UNKNOWN_FORMAT, message, ("context", unknown[0]))
    return context


def _texts(value: Any, path: FieldPath) -> list[str]:
    if isinstance(value, list):
        return [_text(item, (*path, index)) for index, item in enumerate(value)]
    return [_text(value, path)]


def _text(value: Any, path: FieldPath) -> str:
    if not isinstance(value, str):
        raise InvalidRowError(WRONG_TYPE, f"{_dotted(path)} is {_type_name(value)}; write a string", path)
    if any("\ud800" <= character <= "\udfff" for character in value) if not value.isascii() else False:
        raise InvalidRowError(
            "not UTF-8", f"{_dotted(path)} holds an unpaired surrogate, which is not a character; remove it", path
        )
    return value


def _list(value: Any, path: FieldPath) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRowError(WRONG_TYPE, f"{_dotted(path)} is {_type_name(value)}; write a list", path)
    return value


def _member(item: Any, key: str, path: FieldPath) -> Any:
    if not isinstance(item, dict):
        raise InvalidRowError(WRONG_TYPE, f"{_dotted(path)} is {_type_name(item)}; write an object", path)
    if key not in item:
        raise InvalidRowError(MISSING_KEY, f"{_dotted(path)} has {_describe_keys(item)}; add {key!r}", path)
    return item[key]


def _check_target(text: str, path: FieldPath) -> None:
    if not text.strip():
        raise InvalidRowError(EMPTY_TARGET, f"{_dotted(path)} is empty; write an answer or remove the row", path)


def _no_format(row: dict[str, Any]) -> InvalidRowError:
    for row_format in _PARSERS:
        missing = row_format.missing(row)
        if len(missing) < len(row_format.required):
            return InvalidRowError(
                MISSING_KEY, f"the row has {_describe_keys(row)}; add {', '.join(map(repr, missing))}"
            )
    return InvalidRowError(UNKNOWN_FORMAT, f"the row has {_describe_keys(row)}; known formats: {KNOWN_FORMATS}")


def _describe_keys(row: dict[str, Any]) -> str:
    return f"the keys {', '.join(map(repr, row))}" if row else "no keys"


def _dotted(path: FieldPath) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names[type(value)]
