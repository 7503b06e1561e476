"""Known fields of rows and messages, and their effects.

`docs/make_data.py` writes a table of the fields into docs/reference/data_formats.md.

    RowFormat       fields that a format reads
    TEXTS           fields with questions or answers; setting a field that the row format does not read is an error
    LOSS_WEIGHTS    loss weight of an answer: 1 (target) or 0 (context); see loss_weights.py
    REFUSALS        fields that make a row invalid, because they are unsupported or in the wrong place
    METADATA        fields that are ignored

Unknown fields are ignored and logged.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from paddlenlp_ext.data.rows.checked_values import FieldPath
from paddlenlp_ext.data.rows.errors import NOT_SUPPORTED, InvalidRowError
from paddlenlp_ext.data.rows.loss_weights import LOSS_WEIGHTS

TEXTS = ("src", "tgt", "instruction", "input", "output", "history", "query", "response", "completion")
"""Fields with questions or answers."""
KWARGS = ("enable_thinking", "reasoning_effort", "documents")
"""Fields of a row that set the chat template variables with the same names."""
TOOLS = ("tools", "functions")
"""Fields that contain the tool specifications of a row; `functions` is the older name in OpenAI's format."""
CONTEXT = ("system", "context", *TOOLS, "chat_template_kwargs", *KWARGS)
"""Fields that rows of every conversation format may have."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields that hold the reasoning of an answer."""
CALLS = ("tool_calls", "function_call")
"""Fields that hold the tool calls of an answer; `function_call` is OpenAI's older field and holds one call."""
MESSAGE = (*REASONING, *CALLS, "tool_call_id", "name")
"""Fields that a message of any format may have in addition to role and content."""


@dataclass(frozen=True, eq=False)
class RowFormat:
    """Row format and the fields that it reads.

    Attributes:
        name: name of the format in error messages and in docs/reference/data_formats.md.
        required: fields that a row must have; each entry lists alternative names.
        optional: further fields of a row that the format reads.
        message: fields of a message that the format reads, the role first and the content second.
        lost: fields that make a row invalid if they are in neither `required` nor `optional`.
    """

    name: str
    required: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...] = CONTEXT
    message: tuple[str, ...] = ()
    lost: tuple[str, ...] = TEXTS

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """All fields of a row that the format reads."""
        return tuple(name for names in self.required for name in names) + self.optional

    @cached_property
    def refused(self) -> tuple[str, ...]:
        """Fields of `lost` that the format does not read."""
        return tuple(name for name in self.lost if name not in self.fields)

    def missing(self, row: Container[str]) -> list[str]:
        """Return the required fields that a row lacks."""
        return [names[0] for names in self.required if not any(name in row for name in names)]


SRC_TGT = RowFormat("src, tgt", (("src",), ("tgt",)))
QUERY = RowFormat("query, response", (("query",), ("response",)), ("history", *CONTEXT), lost=(*TEXTS, "prompt"))
PROMPT = RowFormat("prompt, completion", (("prompt",), ("completion",)), message=("role", "content", *MESSAGE))
MESSAGES = RowFormat("messages", (("messages",),), message=("role", "content", *MESSAGE))
SHAREGPT = RowFormat("sharegpt", (("conversations",),), message=("from", "value", *MESSAGE))
ALPACA = RowFormat("alpaca", (("instruction", "input"), ("output",)), ("history", *CONTEXT))
ADVERTISE_GEN = RowFormat("AdvertiseGen", (("content",), ("summary",)))
TEXT = RowFormat("plain text", (("src", "text"),), optional=())
CONVERSATION_FORMATS = (SRC_TGT, MESSAGES, SHAREGPT, ALPACA, QUERY, PROMPT, ADVERTISE_GEN)
PART = ("type", "text", "value")
"""Fields of a content part, an item in the list `content` of a message."""
EMPTY = (None, "", [], {})
"""Values that count as not set, such as null or an empty string."""
NOTHING = (*EMPTY, "[]", False)
"""Values that do not enable the feature of a field, such as false or an empty list."""
_ANYWHERE = "row, message, part of `content`"


@dataclass(frozen=True)
class Refusal:
    """Fields that make a row invalid if the row or a message sets them.

    Attributes:
        names: names of the fields.
        problem: predicate of the error message, whose subject is the name of the field.
        remedy: remedy in the error message.
        accepted: values that do not make the row invalid.
    """

    names: tuple[str, ...]
    problem: str
    remedy: str = "remove the field or the row"
    accepted: tuple[Any, ...] = NOTHING


RATINGS = Refusal(
    ("label", "kto_tag"),
    "is not true, but fine-tuning uses only good answers",
    "remove the row, or the field if it does not rate the answer",
    accepted=(*EMPTY, True),
)
REFUSALS = (
    RATINGS,
    Refusal(
        (
            "chosen",
            "rejected",
            "chosen_response",
            "rejected_response",
            "chosen_messages",
            "rejected_messages",
            "preferred_output",
            "non_preferred_output",
            "sort",
            "completions",
        ),
        "is read only in the row formats of preference training (pnx dpo, pnx reward)",
        "write the better answer as the answer, and remove the field",
    ),
    Refusal(
        (*TOOLS, "chat_template_kwargs", *KWARGS),
        "is read only at the top level of a row with a conversation",
        "move it to the row",
    ),
    Refusal((*CALLS, "tool_call_id"), "is read only in a message", "write the row as messages"),
    Refusal(
        REASONING, "is read only in an answer in a list of messages", "write the row as messages, or remove the field"
    ),
    Refusal(("tool_choice",), "is not passed to chat templates", accepted=(*NOTHING, "auto")),
    Refusal(("parallel_tool_calls",), "is neither true nor false", "write true or false", accepted=(*NOTHING, True)),
    Refusal(("rejected_tools",), "is not supported: both answers use the tools in 'tools'"),
    Refusal(
        (
            *("images", "image", "videos", "video", "audios", "audio", "objects"),
            *("rejected_images", "rejected_videos", "rejected_audios", "rejected_objects"),
        ),
        "is not supported: only text can be trained on",
    ),
    Refusal(("refusal",), "is not supported yet", "write the refusal as the answer, and remove the field"),
    Refusal(("system_prompt", "system_message"), "is not read", "rename the field to system"),
    Refusal(("is_system",), "is not read", "write the system prompt, the first item of src, as the field system"),
    Refusal(
        ("conversation", "segments"),
        "is not read",
        'write {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}',
    ),
    Refusal(("input_ids", "labels"), "holds tokens or labels, which are not read", "write the row as text"),
    Refusal(
        ("mask", "masked", "loss_mask", "train_on_turn", "train_detail", "training_detail"),
        "is not supported yet",
        "remove the field, or set the weight of each answer to 0 or 1",
    ),
)
METADATA = (
    "id", "idx", "index", "uuid", "hash", "prompt_id", "question_id", "conversation_id",
    "source", "dataset", "dataset_name", "url", "title", "author", "license", "model", "split",
    "category", "task", "task_type", "type", "topic", "domain", "tags", "lang", "language", "difficulty",
    "score", "rating", "channel", "date", "timestamp", "created", "num_turns", "num_tokens", "meta", "metadata",
)  # fmt: skip
"""Fields that describe a row and do not change its tokens."""

MISPLACED = REFUSALS[2:5]
"""Refusals of fields that are valid elsewhere in a row."""
_MAX_NAMES = 64
"""Number of distinct field sets for which checks are cached; most data files have only a few field sets."""
_REFUSAL_OF = {name: refusal for refusal in REFUSALS for name in refusal.names}
_KNOWN = frozenset((*_REFUSAL_OF, *LOSS_WEIGHTS, *METADATA))


@lru_cache(maxsize=_MAX_NAMES)
def complete_formats(names: tuple[str, ...]) -> tuple[RowFormat, ...]:
    """Return the conversation formats whose required fields are all in `names`."""
    return tuple(row_format for row_format in CONVERSATION_FORMATS if not row_format.missing(names))


@lru_cache(maxsize=_MAX_NAMES)
def _refusals_of(names: tuple[str, ...], read: tuple[str, ...]) -> tuple[tuple[str, Refusal], ...]:
    """Return (name, refusal) for each field in `names` that is not in `read` and has a refusal."""
    return tuple((name, _REFUSAL_OF[name]) for name in names if name not in read and name in _REFUSAL_OF)


def check_refusals(
    fields: dict[str, Any], path: FieldPath = (), read: tuple[str, ...] = (), turn_labels: bool = False
) -> None:
    """Check that a row, message or content part sets no unsupported field.

    Args:
        fields: the row, message or content part.
        path: path of the message or content part in the row; () is the row.
        read: fields that the format reads.
        turn_labels: whether `label` may be a list with the loss weight of each turn.

    Raises:
        InvalidRowError: a field of `REFUSALS` is set.
    """
    for name, refusal in _refusals_of(tuple(fields), read):
        value = fields[name]
        if turn_labels and name == "label" and isinstance(value, list):
            continue
        if value not in refusal.accepted:
            raise InvalidRowError(NOT_SUPPORTED, f"{name} {refusal.problem}; {refusal.remedy}", (*path, name))


def check_texts(row: dict[str, Any], row_format: RowFormat) -> None:
    """Check that a row has questions and answers only in fields that the format reads.

    Raises:
        InvalidRowError: the row sets a field of `row_format.lost`, which the format does not read.
    """
    for name in row_format.refused:
        if row.get(name) not in NOTHING:
            message = f"{name} is not read in a row of the format {row_format.name}; remove it"
            raise InvalidRowError(NOT_SUPPORTED, message, (name,))


def without_training_fields(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without loss weights and ratings, which prediction ignores."""
    ignored = {*LOSS_WEIGHTS, *RATINGS.names}

    def strip(fields: Any) -> Any:
        return {name: fields[name] for name in fields if name not in ignored} if isinstance(fields, dict) else fields

    stripped = strip(row)
    for name in ("messages", "conversations", "prompt", "completion"):
        if isinstance(stripped.get(name), list):
            stripped[name] = [strip(message) for message in stripped[name]]
    return stripped


def unknown_fields(row: Any, autoregressive: bool = False) -> Iterator[str]:
    """Yield each unknown field of a row; the unknown field `name` of a message is yielded as `messages[].name`."""
    if not isinstance(row, dict):
        return
    if autoregressive:
        if not TEXT.missing(row):
            yield from _unknown(row, ("src",) if "src" in row else TEXT.fields)
        return
    for row_format in complete_formats(tuple(row)):
        lists = [key for (key,) in row_format.required] if row_format.message else []
        yield from unknown_in(row, row_format, lists)


def unknown_in(row: dict[str, Any], row_format: RowFormat, lists: Sequence[str]) -> Iterator[str]:
    """Yield the unknown fields of a row and its messages; the fields named in `lists` hold messages."""
    yield from _unknown(row, row_format.fields)
    for key in lists:
        if key in row_format.fields:
            items = row.get(key)
            is_one = isinstance(items, dict)
            yield from _unknown_in_list([items] if is_one else items, key if is_one else f"{key}[]", row_format.message)


def _unknown_in_list(items: Any, label: str, read: tuple[str, ...]) -> Iterator[str]:
    """Yield each unknown field of messages or content parts once, as `label.name`."""
    found: dict[str, None] = {}
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict):
            found |= dict.fromkeys(f"{label}.{name}" for name in _unknown(item, read))
            found |= dict.fromkeys(_unknown_in_list(item.get("content"), f"{label}.content[]", PART))
    yield from found


def _unknown(fields: dict[str, Any], read: tuple[str, ...]) -> list[str]:
    return [name for name in _unknown_names(tuple(fields), read) if fields[name] not in EMPTY]


@lru_cache(maxsize=_MAX_NAMES)
def _unknown_names(names: tuple[str, ...], read: tuple[str, ...]) -> tuple[str, ...]:
    """Return the fields in `names` that are neither in `read` nor known."""
    return tuple(name for name in names if name not in _KNOWN and name not in read)


def markdown_table() -> str:
    """Return the table of known fields and their effects in docs/reference/data_formats.md."""
    lines = ["| fields | place | effect |", "|---|---|---|"]

    def add(names: tuple[str, ...], holder: str, effect: str) -> None:
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {holder} | {effect} |")

    for row_format in CONVERSATION_FORMATS:
        add(row_format.fields, f'row in the format "{row_format.name}"', "read")
    add(
        TEXT.fields,
        f'row in the format "{TEXT.name}"',
        "read; if a row has both fields, only `src` is read",
    )
    for row_format in (MESSAGES, SHAREGPT, PROMPT):
        add(row_format.message, f'message of a row in the format "{row_format.name}"', "read")
    add(PART, "part of `content`", '`text` or `value` is read if `type` is "text"; other types are invalid')
    add(
        LOSS_WEIGHTS,
        "answer (message of the assistant)",
        "1: target; 0: context, which does not contribute to the loss; other values are invalid",
    )
    add(
        LOSS_WEIGHTS,
        "message that is not an answer",
        "0: no effect; other values are invalid, because only assistant messages can be targets",
    )
    add(LOSS_WEIGHTS, "row", "1: no effect; other values are invalid")
    add(LOSS_WEIGHTS, "part of `content`", "invalid; remedy: set the weight of the message")
    add(
        ("label",),
        f'row in the format "{SRC_TGT.name}"',
        "a list gives the weight of each turn, 1 or 0; for other values, see the next row",
    )
    for refusal in REFUSALS:
        accepted = (json.dumps(value) for value in refusal.accepted if value not in NOTHING)
        condition = " and not ".join(["set", *accepted])
        place = _ANYWHERE if refusal not in MISPLACED else "place where the format does not read the field"
        add(refusal.names, place, f"invalid if {condition}; remedy: {refusal.remedy}")
    add(TEXTS, "row in a format that does not read the field", "invalid if set; remedy: remove the field")
    add(("prompt",), f'row in the format "{QUERY.name}"', "invalid if set; remedy: remove the field")
    add(METADATA, _ANYWHERE, "ignored")
    lines.append(
        f"| other fields that are not empty | {_ANYWHERE} | ignored, and named in the log, once for each file |"
    )
    return "\n".join(lines) + "\n"
