"""Parse a row into a `Conversation`; the keys of the row select its format.

`known_fields` lists the formats, their fields and the effects of the fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paddlenlp_ext.data.rows.checked_values import (
    EMPTY_TARGET,
    MISSING_KEY,
    WRONG_TYPE,
    check_target,
    describe_keys,
    dotted,
    read_json,
    read_list,
    read_object,
    read_text,
    read_texts,
    type_name,
)
from paddlenlp_ext.data.rows.conversation import ROLE_ORDER, SYSTEM, USER, Conversation, Message
from paddlenlp_ext.data.rows.errors import NO_TARGET, NOT_SUPPORTED, UNKNOWN_FORMAT, InvalidRowError
from paddlenlp_ext.data.rows.known_fields import (
    ADVERTISE_GEN,
    ALPACA,
    KWARGS,
    MESSAGES,
    NOTHING,
    PROMPT,
    QUERY,
    SHAREGPT,
    SRC_TGT,
    RowFormat,
    check_refusals,
    check_texts,
    complete_formats,
)
from paddlenlp_ext.data.rows.loss_weights import check_row_weights, context_turns, loss_weights
from paddlenlp_ext.data.rows.parse_messages import read_messages, read_tools

KNOWN_FORMATS = (
    '{"src", "tgt"}, {"messages"}, {"instruction", "output"} (alpaca), {"conversations"} (sharegpt), '
    '{"query", "response"}, {"prompt", "completion"}, {"content", "summary"} (AdvertiseGen), '
    'each with an optional system prompt in "context" or "system"'
)
UNEQUAL_LISTS = "unequal lists"
TWO_SYSTEMS = "two system prompts"


def parse_row(value: Any) -> Conversation:
    """Parse a row of any known format.

    Raises:
        InvalidRowError: the row matches no format or two formats, or a value is missing, empty or of the wrong type.
    """
    if not isinstance(value, dict):
        raise InvalidRowError(WRONG_TYPE, f"the row is {type_name(value)}; write a JSON object")
    complete = complete_formats(tuple(value))
    read = complete[0].fields if complete else ()
    check_refusals(value, read=read, turn_labels=SRC_TGT in complete)
    check_row_weights(value)
    if len(complete) > 1:
        named = " and ".join(row_format.name for row_format in complete)
        raise InvalidRowError(UNKNOWN_FORMAT, f"the row has the keys of two formats: {named}; keep one")
    if not complete:
        raise _no_format(value)
    check_texts(value, complete[0])
    conversation = _PARSERS[complete[0]](value)
    _check_answers(conversation)
    _check_calls(conversation, value)
    system = _choose_system(conversation.system, value)
    if system is not None and conversation.system is None:
        conversation = conversation.with_system(system)
    tools, template_kwargs = read_tools(value), _template_kwargs(value)
    if not tools and not template_kwargs:
        return conversation
    return replace(conversation, tools=tools, template_kwargs=template_kwargs)


def _check_answers(conversation: Conversation) -> None:
    if all(message.role == SYSTEM for message in conversation.messages):
        raise InvalidRowError(EMPTY_TARGET, "the conversation has no turns; add a question and an answer")
    has_target = any(message.is_target for message in conversation.messages)
    if not conversation.answers or (not has_target and conversation.messages[-1].role == USER):
        problem = "the last message is a user message; add its answer"
        raise InvalidRowError(ROLE_ORDER, problem, conversation.messages[-1].path)
    if not has_target:
        raise InvalidRowError(NO_TARGET, "every answer has weight 0, so the row has no target; remove the row")


def _check_calls(conversation: Conversation, row: dict[str, Any]) -> None:
    """Check that answers have at most one tool call each if `parallel_tool_calls` is false."""
    for message in conversation.messages if row.get("parallel_tool_calls") is False else ():
        if len(message.tool_calls) > 1:
            problem = "the answer has several tool calls, but parallel_tool_calls is false; keep one of the calls"
            raise InvalidRowError(NOT_SUPPORTED, problem, message.path)


def _template_kwargs(row: dict[str, Any]) -> dict[str, Any]:
    """Return the chat template variables that a row sets in `chat_template_kwargs` or in the fields `KWARGS`."""
    given = row.get("chat_template_kwargs")
    kwargs = {} if given in NOTHING else read_json(given, ("chat_template_kwargs",))
    kwargs = dict(read_object(kwargs, ("chat_template_kwargs",)))
    for name in KWARGS:
        if row.get(name) is None or (name != "enable_thinking" and row[name] in NOTHING):
            continue
        if name in kwargs and kwargs[name] != row[name]:
            raise InvalidRowError(NOT_SUPPORTED, f"{name} differs from chat_template_kwargs; keep one", (name,))
        kwargs[name] = row[name]
    if not isinstance(kwargs.get("enable_thinking", False), bool):
        found = type_name(kwargs["enable_thinking"])
        raise InvalidRowError(WRONG_TYPE, f"enable_thinking is {found}; write true or false", ("enable_thinking",))
    return kwargs


def parse_text(value: Any) -> str:
    """Return the plain text of a row (`autoregressive`): the field `src` (a text, or texts to join) or `text`.

    Raises:
        InvalidRowError: `src` and `text` are missing, the text is empty or of the wrong type, or the row has an
            unsupported field.
    """
    if not isinstance(value, dict):
        raise InvalidRowError(WRONG_TYPE, f"the row is {type_name(value)}; write a JSON object")
    check_refusals(value)
    check_row_weights(value)
    key = "src" if "src" in value else "text"
    if key not in value:
        raise InvalidRowError(MISSING_KEY, f'the row has {describe_keys(value)}; autoregressive needs "src" or "text"')
    text = "".join(read_texts(value[key], (key,)))
    if not text.strip():
        raise InvalidRowError(EMPTY_TARGET, f"{key!r} is empty; add text or remove the row", (key,))
    return text


def _parse_src_tgt(row: dict[str, Any]) -> Conversation:
    sources, targets = read_texts(row["src"], ("src",)), read_texts(row["tgt"], ("tgt",))
    if len(sources) != len(targets):
        message = f"src has {len(sources)} items, but tgt has {len(targets)}; write one item of src and tgt per turn"
        raise InvalidRowError(UNEQUAL_LISTS, message, ("tgt",))
    for index, target in enumerate(targets):
        check_target(target, ("tgt", index) if isinstance(row["tgt"], list) else ("tgt",))
    turns = list(zip(sources, targets, strict=True))
    return Conversation.from_turns(None, turns, context_turns(row.get("label"), len(targets)))


def _parse_messages(row: dict[str, Any]) -> Conversation:
    return Conversation(tuple(read_messages(row["messages"], ("messages",), MESSAGES)))


def _parse_prompt(row: dict[str, Any]) -> Conversation:
    """Parse a prompt and a completion, which are both texts or both lists of messages.

    Answers in the prompt contribute to the loss only if their loss weight is 1.
    """
    if not isinstance(row["prompt"], list):
        return Conversation.from_turns(None, [_turn(row, "prompt", "completion")])
    given = read_messages(row["prompt"], ("prompt",), PROMPT)
    context = [replace(message, is_target=message.is_target and _has_weight_1(row, message)) for message in given]
    return Conversation((*context, *read_messages(row["completion"], ("completion",), PROMPT)))


def _has_weight_1(row: dict[str, Any], message: Message) -> bool:
    _, index = message.path
    return True in loss_weights(row["prompt"][index]).values()


def _parse_sharegpt(row: dict[str, Any]) -> Conversation:
    return Conversation(tuple(read_messages(row["conversations"], ("conversations",), SHAREGPT)))


def _parse_alpaca(row: dict[str, Any]) -> Conversation:
    turns = _history(row)
    present = [name for name in ("instruction", "input") if row.get(name) is not None] or ["instruction"]
    parts = [read_text(row.get(name), (name,)) for name in present]
    output = read_text(row["output"], ("output",))
    check_target(output, ("output",))
    turns.append(("\n".join(part for part in parts if part), output))
    return Conversation.from_turns(None, turns)


def _parse_query(row: dict[str, Any]) -> Conversation:
    return Conversation.from_turns(None, [*_history(row), _turn(row, "query", "response")])


def _parse_advertise_gen(row: dict[str, Any]) -> Conversation:
    return Conversation.from_turns(None, [_turn(row, "content", "summary")])


def _turn(row: dict[str, Any], question_key: str, answer_key: str) -> tuple[str, str]:
    question, answer = read_text(row[question_key], (question_key,)), read_text(row[answer_key], (answer_key,))
    check_target(answer, (answer_key,))
    return question, answer


def _history(row: dict[str, Any]) -> list[tuple[str, str]]:
    turns = []
    for index, pair in enumerate(read_list(row.get("history") or [], ("history",))):
        path = ("history", index)
        if not isinstance(pair, list) or len(pair) != 2:
            raise InvalidRowError(WRONG_TYPE, f"a turn of history is {type_name(pair)}; write [question, answer]", path)
        question, answer = read_text(pair[0], (*path, 0)), read_text(pair[1], (*path, 1))
        check_target(answer, (*path, 1))
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


def _choose_system(from_messages: str | None, row: dict[str, Any]) -> str | None:
    """Return the system prompt from a system message, the field `system`, or `system` in the field `context`.

    Null or an empty string in a field means that the field sets no system prompt.
    """
    chosen = from_messages
    for holder, path in ((row, ("system",)), (_context(row), ("context", "system"))):
        if holder.get("system") is None:
            continue
        text = read_text(holder["system"], path)
        if text and chosen not in (None, text):
            raise InvalidRowError(
                TWO_SYSTEMS, f"{dotted(path)} differs from another system prompt of the row; keep one", path
            )
        chosen = chosen if chosen is not None else text or None
    return chosen


def _context(row: dict[str, Any]) -> dict[str, Any]:
    """Return the field `context`, which may hold only a system prompt."""
    context = row.get("context")
    if context in NOTHING:
        return {}
    if not isinstance(context, dict):
        raise InvalidRowError(
            WRONG_TYPE, f'context is {type_name(context)}; write an object such as {{"system": ...}}', ("context",)
        )
    unknown = sorted(set(context) - {"system"})
    if unknown:
        message = f'context may only hold "system"; remove {", ".join(map(repr, unknown))}, which would have no effect'
        raise InvalidRowError(UNKNOWN_FORMAT, message, ("context", unknown[0]))
    return context


def _no_format(row: dict[str, Any]) -> InvalidRowError:
    for row_format in _PARSERS:
        missing = row_format.missing(row)
        if len(missing) < len(row_format.required):
            return InvalidRowError(
                MISSING_KEY, f"the row has {describe_keys(row)}; add {', '.join(map(repr, missing))}"
            )
    return InvalidRowError(UNKNOWN_FORMAT, f"the row has {describe_keys(row)}; known formats: {KNOWN_FORMATS}")
