"""Prompts of a task: from the fields of a row to text, and from text to token ids.

A prompt is a conversation, which the chat template writes as in llm/predict/predictor.py, or plain text that the model
continues. The ids of plain text and its continuation are those of lm-evaluation-harness: both are encoded together, and
the continuation has the ids after the number of ids of the prompt. White space at the end of the prompt belongs to the
continuation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.data.prediction_prompts import Prompt, encode_truncated_prompt, parse_prompt
from paddlenlp_ext.data.rows.checked_values import FieldPath, dotted, read_member, read_object, read_text, type_name
from paddlenlp_ext.data.rows.conversation import Conversation
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.evaluation.likelihood import Continuation, prompt_room, truncate_left
from paddlenlp_ext.evaluation.options import TaskOptions, fields_of, fill_fields

INVALID_ANSWER = "invalid answer"


def read_field(row: dict[str, Any], name: str) -> str:
    """Return a field of a row as text; numbers are written out.

    Raises:
        InvalidRowError: the field is missing, or is neither a string nor a number.
    """
    return as_text(read_member(row, name, ()), (name,))


def as_text(value: Any, path: FieldPath) -> str:
    """Return a string, or a number written out.

    Raises:
        InvalidRowError: the value is something else.
    """
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else read_text(value, path)


def fill_from_row(text: str, row: dict[str, Any]) -> str:
    """Return a text with its {field} replaced by the fields of a row.

    Raises:
        InvalidRowError: as for `read_field`.
    """
    return fill_fields(text, {name: read_field(row, name) for name in fields_of(text)})


def read_prompt(value: Any, options: TaskOptions) -> Prompt | str:
    """Return the prompt of a row: a conversation, or plain text if `options.chat` is false.

    Raises:
        InvalidRowError: the row lacks a field of the prompt, or has no format of training.
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
    """Return the right answers of a row with the field `options.answer`: a text, a number, or a list of them.

    Raises:
        InvalidRowError: there is none, one is blank, or the field has another type.
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


def split_pair(encode: Callable[[str], list[int]], context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the ids of a text and of its continuation, as described above; those of an empty text are [].

    Args:
        encode: function from a text to its ids, with the ids that precede every text.
        context: the text.
        continuation: text that follows it.
    """
    stripped = context.rstrip()
    ids = encode(stripped) if stripped else []
    return ids, encode(context + continuation)[len(ids) :]


@dataclass(frozen=True)
class PromptEncoder:
    """Encoder of prompts for one model.

    Attributes:
        tokenizer: a Hugging Face tokenizer.
        template: chat template, which also knows the ids that precede a text.
        max_length: maximum tokens of a prompt and what follows it.
    """

    tokenizer: Any
    template: ChatTemplate
    max_length: int

    @property
    def start_ids(self) -> list[int]:
        """Ids before an empty text: those of the tokenizer, else its first or its end token.

        Raises:
            ValueError: the tokenizer has none of them.
        """
        ids = list(self.template.encoder.prefix_ids)
        if ids:
            return ids
        special = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        token = next((token for token in special if token is not None), None)
        if token is None:
            raise ValueError(f"the tokenizer {self.tokenizer.name_or_path!r} has neither a first nor an end token")
        return [int(token)]

    def text(self, text: str) -> list[int]:
        """Return the ids of a plain text, with those that the tokenizer puts before it."""
        return [*self.template.encoder.prefix_ids, *self.template.encoder.encode([text], [False])[0]]

    def continuation(self, prompt: Prompt | str, text: str, delimiter: str = "") -> Continuation:
        """Return the ids of a prompt and of a text after it; `delimiter` separates it from plain text.

        Raises:
            ValueError: the text, or the template's part of the prompt, exceeds `max_length` by itself.
        """
        if isinstance(prompt, str):
            ids, continued = split_pair(self.text, prompt, delimiter + text)
            if not ids:
                prefix = list(self.template.encoder.prefix_ids)
                ids, continued = self.start_ids, continued[len(prefix) :]
        else:
            encoder = self.template.encoder
            continued = encoder.encode([text], [self.template.pieces_continue])[0]
            ids, _ = encode_truncated_prompt(self.template, prompt, prompt_room(continued, self.max_length))
        return truncate_left(Continuation(ids, continued), self.max_length)

    def prompt(self, prompt: Prompt | str, num_new: int) -> list[int]:
        """Return the ids of a prompt that leaves room for `num_new` tokens: plain text loses its beginning.

        A conversation loses its oldest turns, then the end of the last message.

        Raises:
            ValueError: there is no room for a prompt.
        """
        room = self.max_length - num_new
        if room < 1:
            raise ValueError(f"max_new_tokens {num_new} leaves no room for a prompt in {self.max_length} tokens")
        if isinstance(prompt, str):
            return (self.text(prompt) or self.start_ids)[-room:]
        return encode_truncated_prompt(self.template, prompt, room)[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
