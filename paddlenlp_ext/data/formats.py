"""Formats of a row, and their parsers, each of which returns a `Conversation`.

The keys of a row select its format; other keys (an id, a source) are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paddlenlp_ext.data.types import Conversation, InvalidRowError

KNOWN_FORMATS = (
    '{"src", "tgt"}, {"messages"}, {"instruction", "output"} (alpaca), {"conversations"} (sharegpt), '
    'each with an optional system prompt in "context" or "system"'
)
WRONG_TYPE = "wrong type"
MISSING_KEY = "missing key"
UNKNOWN_FORMAT = "unknown format"
EMPTY_TARGET = "empty target"
UNEQUAL_LISTS = "unequal lists"
ROLE_ORDER = "role order"
TWO_SYSTEMS = "two system prompts"
NOT_SUPPORTED = "not supported"

Message = tuple[str, str, tuple[str | int, ...]]
"""Role, text, and path of the text in its row."""


def parse_row(value: Any) -> Conversation:
    """Return the conversation in a row of any known format.

    Raises:
        InvalidRowError: the row matches no format or two formats, or a part is missing, empty or of the wrong type.
    """
    if not isinstance(value, dict):
        raise InvalidRowError(WRONG_TYPE, f"the row is {_type_name(value)}; write a JSON object")
    complete = [parse for keys, parse in _FORMATS if all(key in value for key in keys)]
    if len(complete) > 1:
        named = " and ".join("/".join(keys) for keys, _ in _FORMATS if all(key in value for key in keys))
        raise InvalidRowError(UNKNOWN_FORMAT, f"the row has the keys of two formats: {named}; keep one")
    if not complete:
        raise _no_format(value)
    conversation = complete[0](value)
    if not conversation.turns:
        raise InvalidRowError(EMPTY_TARGET, "the conversation has no turns; add a question and an answer")
    return Conversation(_choose_system(conversation.system, value), conversation.turns)


def parse_text(value: Any) -> str:
    """Return the plain text of a row, for `autoregressive`: its `src` (lists are joined) or its `text`.

    Raises:
        InvalidRowError: both keys are missing, or the text is empty or of the wrong type.
    """
    if not isinstance(value, dict):
        raise InvalidRowError(WRONG_TYPE, f"the row is {_type_name(value)}; write a JSON object")
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
    context = {} if row.get("context") is None else row["context"]
    if not isinstance(context, dict):
        raise InvalidRowError(
            WRONG_TYPE, f'context is {_type_name(context)}; write an object such as {{"system": ...}}', ("context",)
        )
    unknown = sorted(set(context) - {"system"})
    if unknown:
        message = f'context may only hold "system"; remove {", ".join(map(repr, unknown))}, which would have no effect'
        raise InvalidRowError(UNKNOWN_FORMAT, message, ("context", unknown[0]))
    return Conversation(None, tuple(zip(sources, targets, strict=True)))


def _parse_messages(row: dict[str, Any]) -> Conversation:
    messages = []
    for index, item in enumerate(_list(row["messages"], ("messages",))):
        path = ("messages", index)
        role = _member(item, "role", path)
        if role == "assistant":
            _check_only_text(item, path)
        messages.append((role, _content(_member(item, "content", path), (*path, "content")), (*path, "content")))
    return _alternate(messages, {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"})


def _parse_sharegpt(row: dict[str, Any]) -> Conversation:
    messages = []
    for index, item in enumerate(_list(row["conversations"], ("conversations",))):
        path = ("conversations", index)
        speaker = _member(item, "from", path)
        messages.append((speaker, _text(_member(item, "value", path), (*path, "value")), (*path, "value")))
    roles = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
    return _alternate(messages, roles)


def _parse_alpaca(row: dict[str, Any]) -> Conversation:
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
    instruction, output = _text(row["instruction"], ("instruction",)), _text(row["output"], ("output",))
    extra = _text(row["input"], ("input",)) if row.get("input") is not None else ""
    _check_target(output, ("output",))
    turns.append((f"{instruction}\n{extra}" if extra else instruction, output))
    return Conversation(None, tuple(turns))


_FORMATS: tuple[tuple[tuple[str, ...], Callable[[dict[str, Any]], Conversation]], ...] = (
    (("src", "tgt"), _parse_src_tgt),
    (("messages",), _parse_messages),
    (("conversations",), _parse_sharegpt),
    (("instruction", "output"), _parse_alpaca),
)


def _alternate(messages: Sequence[Message], roles: dict[str, str]) -> Conversation:
    """Return the turns of messages: an optional system prompt, then user and assistant alternately, an answer last."""
    system: str | None = None
    turns: list[tuple[str, str]] = []
    question: str | None = None
    for index, (name, text, path) in enumerate(messages):
        role = roles.get(name) if isinstance(name, str) else None
        if role is None:
            known = ", ".join(roles)
            raise InvalidRowError(ROLE_ORDER, f"role {name!r} is unknown; use {known}", path[:-1])
        if role == "system":
            if index:
                raise InvalidRowError(
                    ROLE_ORDER, "a system message follows another message; move it to the beginning", path[:-1]
                )
            system = text
        elif role == "user":
            if question is not None:
                raise InvalidRowError(
                    ROLE_ORDER, "a user message follows a user message; add the answer, or join them", path[:-1]
                )
            question = text
        else:
            if question is None:
                raise InvalidRowError(
                    ROLE_ORDER, "an assistant message has no user message before it; add the question", path[:-1]
                )
            _check_target(text, path)
            turns.append((question, text))
            question = None
    if question is not None:
        raise InvalidRowError(ROLE_ORDER, "the last message is a user message; add its answer", messages[-1][2][:-1])
    return Conversation(system, tuple(turns))


def _content(value: Any, path: tuple[str | int, ...]) -> str:
    """Return the text of OpenAI content: a string, or a list of parts of type "text"."""
    if not isinstance(value, list):
        return _text(value, path)
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise InvalidRowError(
                WRONG_TYPE, 'the part is not of type "text"; only text can be trained on', (*path, index)
            )
        texts.append(_text(_member(part, "text", (*path, index)), (*path, index, "text")))
    return "".join(texts)


def _check_only_text(message: dict[str, Any], path: tuple[str | int, ...]) -> None:
    """Raise InvalidRowError if an assistant message has members that training cannot honor."""
    for key in ("tool_calls", "function_call"):
        if message.get(key):
            raise InvalidRowError(NOT_SUPPORTED, f"{key} cannot be trained on; remove the row", (*path, key))
    weight = message.get("weight")
    if weight is not None and weight != 1:
        remedy = "every answer has weight 1 in the loss; end the row before this answer, or remove its weight"
        raise InvalidRowError(NOT_SUPPORTED, f"weight {weight!r}: {remedy}", (*path, "weight"))


def _choose_system(from_messages: str | None, row: dict[str, Any]) -> str | None:
    """Return the system prompt from a system message, the row's `system`, or `system` in its `context`.

    In `system` and `context`, null and the empty string both mean no system prompt.
    """
    chosen = from_messages
    for holder, path in ((row, ("system",)), (row.get("context"), ("context", "system"))):
        if not isinstance(holder, dict) or holder.get("system") is None:
            continue
        text = _text(holder["system"], path)
        if text and chosen not in (None, text):
            raise InvalidRowError(
                TWO_SYSTEMS, f"{_dotted(path)} differs from the system prompt before it; keep one", path
            )
        chosen = chosen if chosen is not None else text or None
    return chosen


def _texts(value: Any, path: tuple[str | int, ...]) -> list[str]:
    if isinstance(value, list):
        return [_text(item, (*path, index)) for index, item in enumerate(value)]
    return [_text(value, path)]


def _text(value: Any, path: tuple[str | int, ...]) -> str:
    if not isinstance(value, str):
        raise InvalidRowError(WRONG_TYPE, f"{_dotted(path)} is {_type_name(value)}; write a string", path)
    if any("\ud800" <= character <= "\udfff" for character in value) if not value.isascii() else False:
        raise InvalidRowError(
            "not UTF-8", f"{_dotted(path)} holds an unpaired surrogate, which is not a character; remove it", path
        )
    return value


def _list(value: Any, path: tuple[str | int, ...]) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRowError(WRONG_TYPE, f"{_dotted(path)} is {_type_name(value)}; write a list", path)
    return value


def _member(item: Any, key: str, path: tuple[str | int, ...]) -> Any:
    if not isinstance(item, dict):
        raise InvalidRowError(WRONG_TYPE, f"{_dotted(path)} is {_type_name(item)}; write an object", path)
    if key not in item:
        raise InvalidRowError(MISSING_KEY, f"{_dotted(path)} has {_describe_keys(item)}; add {key!r}", path)
    return item[key]


def _check_target(text: str, path: tuple[str | int, ...]) -> None:
    if not text.strip():
        raise InvalidRowError(EMPTY_TARGET, f"{_dotted(path)} is empty; write an answer or remove the row", path)


def _no_format(row: dict[str, Any]) -> InvalidRowError:
    for keys, _ in _FORMATS:
        absent = [key for key in keys if key not in row]
        if len(absent) < len(keys):
            return InvalidRowError(
                MISSING_KEY, f"the row has {_describe_keys(row)}; add {', '.join(map(repr, absent))}"
            )
    return InvalidRowError(UNKNOWN_FORMAT, f"the row has {_describe_keys(row)}; known formats: {KNOWN_FORMATS}")


def _describe_keys(row: dict[str, Any]) -> str:
    return f"the keys {', '.join(map(repr, row))}" if row else "no keys"


def _dotted(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names[type(value)]
