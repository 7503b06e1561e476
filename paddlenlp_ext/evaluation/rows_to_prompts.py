"""Convert the rows of a task to prompts, which are conversations or plain text, and to reference answers."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.data.prediction_prompts import Prompt, parse_prompt
from paddlenlp_ext.data.rows.checked_values import dotted, read_member, read_object, type_name
from paddlenlp_ext.data.rows.conversation import Conversation
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.evaluation.prompt_template import as_text, fill_from_row
from paddlenlp_ext.evaluation.task_options import TaskOptions

INVALID_ANSWER = "invalid answer"


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
    """Return plain text unchanged, or the last message of a conversation."""
    return prompt if isinstance(prompt, str) else prompt.text


def read_answers(row: dict[str, Any], options: TaskOptions) -> list[str]:
    """Return the reference answers of a row as texts.

    The field `options.answer` contains a text, a number, or a list of texts and numbers.

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
