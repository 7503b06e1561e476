"""Read the prompt and the reference answers from a row of a task."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.data.prediction_prompts import Prompt, parse_prompt
from paddlenlp_ext.data.rows.checked_values import FieldPath, dotted, read_member, read_object, read_text, type_name
from paddlenlp_ext.data.rows.conversation import Conversation
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.evaluation.task_options import TaskOptions, fields_of, fill_fields

INVALID_ANSWER = "invalid answer"


def read_field(row: dict[str, Any], name: str) -> str:
    """Return a field of a row as text; a number is converted to text.

    Raises:
        InvalidRowError: the field is missing, or is neither a string nor a number.
    """
    return as_text(read_member(row, name, ()), (name,))


def as_text(value: Any, path: FieldPath) -> str:
    """Return a string unchanged, or a number as text.

    Raises:
        InvalidRowError: the value is neither a string nor a number.
    """
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else read_text(value, path)


def fill_from_row(text: str, row: dict[str, Any]) -> str:
    """Replace each {field} in a text with the value of the field in a row.

    Raises:
        InvalidRowError: a field is missing, or is neither a string nor a number.
    """
    return fill_fields(text, {name: read_field(row, name) for name in fields_of(text)})


def read_prompt(value: Any, options: TaskOptions) -> Prompt | str:
    """Return the prompt of a row: a conversation, or plain text if `options.chat` is false.

    Raises:
        InvalidRowError: the row lacks a field of the prompt, or is not in a fine-tuning format.
    """
    row = read_object(value, ())
    if options.prompt is None:
        return parse_prompt(row)
    text = fill_from_row(options.prompt, row)
    return Prompt(Conversation.asking(text, ()), None) if options.chat else text


def prompt_text(prompt: Prompt | str) -> str:
    """Return the text of a prompt for a report: the last message of a conversation."""
    return prompt if isinstance(prompt, str) else prompt.text


def read_answers(row: dict[str, Any], options: TaskOptions) -> list[str]:
    """Return the reference answers of a row as texts.

    The field `options.answer` has a text, a number, or a list of texts and numbers.

    Raises:
        InvalidRowError: the field is missing, is empty, has a blank answer or has a value of another type.
    """
    value = read_member(row, options.answer, ())
    values = value if isinstance(value, list) else [value]
    path = (options.answer,)
    for each in values:
        if not isinstance(each, str | int | float) or isinstance(each, bool):
            message = f"{dotted(path)} is {type_name(each)}; write a string or a number"
            raise InvalidRowError(INVALID_ANSWER, message, path)
    texts = [as_text(each, path) for each in values]
    if not texts or any(not text.strip() for text in texts):
        raise InvalidRowError(INVALID_ANSWER, f"{options.answer} is empty; write an answer", path)
    return texts
