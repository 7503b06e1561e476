"""Parse rows of preference data: a prompt with a pair of answers, or with one rated answer.

Fields that `pair_formats.FORMATS` does not list have the same effects as in fine-tuning (data/rows/known_fields.py).
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import Any

from paddlenlp_ext.data.preference.pair_formats import FORMATS, OPENAI_PAIR, RATED, SAME_ANSWERS, SPLITS, Places
from paddlenlp_ext.data.rows.checked_values import MISSING_KEY, WRONG_TYPE, FieldPath, describe_keys, dotted
from paddlenlp_ext.data.rows.conversation import Conversation
from paddlenlp_ext.data.rows.errors import UNKNOWN_FORMAT, InvalidRowError
from paddlenlp_ext.data.rows.known_fields import CONTEXT, MESSAGES, RowFormat, check_texts, unknown_in
from paddlenlp_ext.data.rows.row_formats import parse_row


@dataclass(frozen=True)
class Answer:
    """Answer of a preference row, with its prompt.

    Attributes:
        conversation: the prompt and the answer; only assistant messages of the answer are targets.
        is_desirable: whether the answer is chosen or rated as good.
    """

    conversation: Conversation
    is_desirable: bool

    @property
    def prompt(self) -> Conversation:
        """Messages before the first target."""
        is_target = [message.is_target for message in self.conversation.messages]
        return self.conversation.until(is_target.index(True))


def parse_preference(value: Any) -> tuple[Answer, ...]:
    """Return the answers of a row: a pair with the chosen answer first, or one rated answer.

    Raises:
        InvalidRowError: the row matches no format or two formats, or a field is missing, empty or of the wrong type.
    """
    if not isinstance(value, dict):
        raise InvalidRowError(WRONG_TYPE, "the row is not an object; write a JSON object")
    complete = _complete_formats(value)
    if len(complete) > 1:
        named = " and ".join(row_format.name for row_format in complete)
        raise InvalidRowError(UNKNOWN_FORMAT, f"the row has the keys of two formats: {named}; keep one")
    if not complete:
        raise _no_format(value)
    row_format = complete[0]
    check_texts(value, row_format)
    answers: list[Answer] = []
    for row, places, is_desirable in SPLITS[row_format](value):
        conversation = _parse(row, places, value)
        if not row_format.message:
            conversation = conversation.with_targets((len(conversation.messages) - 1,))
        if answers and conversation == answers[0].conversation:
            message = "both answers are the same, so neither is preferred; remove the row"
            raise InvalidRowError(SAME_ANSWERS, message, [*places.values()][-1][:1])
        answers.append(Answer(conversation, is_desirable))
    return tuple(answers)


def unknown_preference_fields(row: Any, read: Container[str] = ()) -> Iterator[str]:
    """Yield each unknown field of a row; the unknown field `name` of a message in `chosen` is `chosen[].name`.

    `read` contains additional fields of the row that the caller reads.
    """
    for row_format in _complete_formats(row) if isinstance(row, dict) else ():
        lists = [name for name in row_format.fields if name not in (*CONTEXT, "input")]
        yield from (name for name in unknown_in(row, row_format, lists) if name not in read)
        if row_format is OPENAI_PAIR and isinstance(row["input"], dict):
            yield from (f"input.{name}" for name in unknown_in(row["input"], MESSAGES, ("messages",)))


def _complete_formats(row: dict[str, Any]) -> list[RowFormat]:
    """Return the formats for which a row has all required fields.

    A format is left out if another returned format requires the same fields and additional fields.
    """
    complete = [row_format for row_format in FORMATS if not row_format.missing(row)]
    required = [set(row_format.required) for row_format in complete]
    return [each for each in complete if not any(set(each.required) < others for others in required)]


def _no_format(row: dict[str, Any]) -> InvalidRowError:
    for row_format in FORMATS:
        missing = row_format.missing(row)
        if row_format not in RATED and len(missing) < len(row_format.required):
            return InvalidRowError(
                MISSING_KEY, f"the row has {describe_keys(row)}; add {', '.join(map(repr, missing))}"
            )
    known = "; ".join(row_format.name for row_format in FORMATS)
    return InvalidRowError(UNKNOWN_FORMAT, f"the row has {describe_keys(row)}; known formats: {known}")


def _parse(row: dict[str, Any], places: Places, written: dict[str, Any]) -> Conversation:
    """Parse the fine-tuning row of an answer; paths in messages and errors refer to `written`, the row in the file."""

    def rename(path: FieldPath) -> FieldPath:
        for length in (2, 1):
            place = places.get(path[:length])
            if place is not None:
                return place[:1] if isinstance(written[str(place[0])], str) else (*place, *path[length:])
        return path

    try:
        conversation = parse_row(row)
    except InvalidRowError as error:
        path = rename(error.path)
        message = str(error).replace(dotted(error.path), dotted(path)) if error.path else str(error)
        raise InvalidRowError(error.reason, message, path, by_policy=error.by_policy) from error
    messages = (replace(message, path=rename(message.path)) for message in conversation.messages)
    return replace(conversation, messages=tuple(messages))
