"""Read rows for prediction. The row formats are the same as for training, but the last answer is optional."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from paddlenlp_ext.data.readers.dataset_files import read_rows
from paddlenlp_ext.data.rows.conversation import ROLE_ORDER, TOOL, USER, Conversation
from paddlenlp_ext.data.rows.errors import MAX_LISTED, InvalidRowError
from paddlenlp_ext.data.rows.known_fields import without_training_fields
from paddlenlp_ext.data.rows.parse_messages import OPENAI_ROLES, SHAREGPT_ROLES
from paddlenlp_ext.data.rows.row_formats import parse_row
from paddlenlp_ext.data.rows.source_row import InvalidRow
from paddlenlp_ext.data.templates.base import ChatTemplate

ItemT = TypeVar("ItemT")
_STAND_IN = "?"  # placeholder for a missing answer, so that `parse_row` accepts the row


@dataclass(frozen=True)
class Prompt:
    """Prompt for generation, and the reference answer of its row.

    Attributes:
        conversation: messages before the answer to generate, with the tools and template variables of the row.
        reference: text of the last answer in the row; None if the row does not end with an answer.
    """

    conversation: Conversation
    reference: str | None

    def with_system(self, text: str) -> Prompt:
        """Return a copy with the system prompt `text`, or this prompt unchanged if it already has a system prompt."""
        if self.conversation.system is not None:
            return self
        return replace(self, conversation=self.conversation.with_system(text))

    @property
    def text(self) -> str:
        """Content of the last message."""
        return self.conversation.messages[-1].content

    @property
    def src(self) -> str | list[str]:
        """Value of "src" in the output: the question as a string, or a list of questions if there are several turns."""
        questions = [message.content for message in self.conversation.messages if message.role == USER]
        return questions if len(questions) > 1 else (questions or [self.text])[0]

    @property
    def tgt(self) -> str | list[str]:
        """Value of "tgt" in the output: a string or a list, like `src`; "" stands for a missing last answer."""
        answers = [message.content for message in self.conversation.answers] + [self.reference or ""]
        return answers if isinstance(self.src, list) else answers[-1]


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Return the prompt of every row in a data file.

    Raises:
        ValueError: see `parse_file`.
    """
    return parse_file(path, parse_prompt)


def parse_file(path: str | os.PathLike[str], parse: Callable[[Any], ItemT], max_rows: int | None = None) -> list[ItemT]:
    """Apply `parse` to the JSON value of every row of a file, and return the results.

    Args:
        path: a data file, in any supported file format.
        parse: function that converts the JSON value of a row; it raises `InvalidRowError` for an invalid row.
        max_rows: maximum number of rows to read; None: all rows.

    Raises:
        ValueError: the file does not exist, has no rows, or has invalid rows; the message lists the first invalid rows.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"data_file: {str(path)!r} is not a file; pass a file with one JSON object per line")
    items: list[ItemT] = []
    problems: list[InvalidRow] = []
    for row in islice(read_rows(path), max_rows):
        if isinstance(row, InvalidRow):
            problems.append(row)
            continue
        try:
            items.append(parse(row.value))
        except InvalidRowError as error:
            problems.append(error.in_row(row))
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems[:MAX_LISTED])
        raise ValueError(
            f"{len(problems)} invalid row{'s' if len(problems) > 1 else ''} in the data file; fix them:\n{listed}"
        )
    if not items:
        raise ValueError(f"data_file: {str(path)!r} has no rows; write one JSON object per line")
    return items


def parse_prompt(value: Any) -> Prompt:
    """Return the prompt of a row, which may lack the last answer; loss weights and ratings are ignored.

    Raises:
        InvalidRowError: see `row_formats.parse_row`.
    """
    if isinstance(value, dict):
        value = without_training_fields(value)
    completed = _with_an_answer(value) if isinstance(value, dict) else None
    conversation = parse_row(value if completed is None else completed)
    last = max(index for index, message in enumerate(conversation.messages) if message.is_answer)
    reference = conversation.messages[last].content if completed is None else None
    if last == 0:
        problem = "the conversation has no message before its last answer; add a question"
        raise InvalidRowError(ROLE_ORDER, problem, conversation.messages[0].path)
    return Prompt(conversation.until(last), reference)


def _with_an_answer(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return a row with a placeholder as its last answer; None if the answer exists or the row has no known format."""
    if "src" in row:
        return _complete_target(row)
    for questions, answer_key in (
        (("instruction", "input"), "output"),
        (("query",), "response"),
        (("content",), "summary"),
    ):
        if any(name in row for name in questions):
            return None if _is_given(row.get(answer_key)) else {**row, answer_key: _STAND_IN}
    for key, role_key, roles, answer in (
        ("messages", "role", OPENAI_ROLES, {"role": "assistant", "content": _STAND_IN}),
        ("conversations", "from", SHAREGPT_ROLES, {"from": "gpt", "value": _STAND_IN}),
    ):
        messages = row.get(key)
        if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
            role = messages[-1].get(role_key)
            asks = isinstance(role, str) and roles.get(role) in (USER, TOOL)
            return {**row, key: [*messages, answer]} if asks else None
    if "prompt" in row and not _is_given(row.get("completion")):
        is_list = isinstance(row["prompt"], list)
        return {**row, "completion": [{"role": "assistant", "content": _STAND_IN}] if is_list else _STAND_IN}
    return None


def _complete_target(row: dict[str, Any]) -> dict[str, Any] | None:
    source, target = row["src"], row.get("tgt")
    if not isinstance(source, list):
        return None if _is_given(target) else {**row, "tgt": _STAND_IN}
    targets = [] if target is None or target == "" else target
    if not isinstance(targets, list):
        return None
    if len(targets) == len(source) - 1:
        return {**row, "tgt": [*targets, _STAND_IN]}
    return None if not targets or _is_given(targets[-1]) else {**row, "tgt": [*targets[:-1], _STAND_IN]}


def _is_given(answer: Any) -> bool:
    return answer not in (None, []) and (not isinstance(answer, str) or bool(answer.strip()))


def encode_truncated_prompt(template: ChatTemplate, prompt: Prompt, max_tokens: int) -> tuple[list[int], bool]:
    """Return at most `max_tokens` prompt ids, and whether the prompt was truncated.

    Truncation removes the oldest turns first, then the end of the last message. Template text and the system
    prompt are never removed.

    Raises:
        ValueError: the template text and the system prompt alone exceed `max_tokens`.
    """
    conversation = prompt.conversation
    ids = template.encode_prompt(conversation)
    was_truncated = len(ids) > max_tokens
    while len(ids) > max_tokens and (shorter := conversation.without_oldest_turn()) is not None:
        conversation = shorter
        ids = template.encode_prompt(conversation)
    *before, last = conversation.messages
    tokenizer = template.encoder.tokenizer
    text_ids = template.encoder.encode([last.content], [False])[0]
    while len(ids) > max_tokens and text_ids:
        text_ids = text_ids[: max(0, len(text_ids) - (len(ids) - max_tokens))]
        text = tokenizer.decode(text_ids, clean_up_tokenization_spaces=False)
        ids = template.encode_prompt(replace(conversation, messages=(*before, replace(last, content=text))))
    if len(ids) > max_tokens:
        raise ValueError(
            f"even without its question, the prompt has {len(ids)} tokens, more than the limit of {max_tokens}; raise "
            "src_length or max_length"
        )
    return ids, was_truncated
