"""Rows to be answered: the formats of training, but the last answer may be missing, and it is no part of the prompt."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddlenlp_ext.data.formats import parse_row
from paddlenlp_ext.data.sources import location_of, read_rows
from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.data.types import MAX_LISTED, Conversation, InvalidRow, InvalidRowError

_STAND_IN = "?"  # takes the place of an answer that a row lacks, so that training's reader can read the row


@dataclass(frozen=True)
class Prompt:
    """The last question of a row, what was said before it, and the answer the row has for it (None without one)."""

    text: str
    history: tuple[tuple[str, str], ...]
    system: str | None
    reference: str | None

    @property
    def src(self) -> str | list[str]:
        """The questions as a row's "src": a text, or a list where there are several turns."""
        return [*(question for question, _ in self.history), self.text] if self.history else self.text

    @property
    def tgt(self) -> str | list[str]:
        """The answers as a row's "tgt", a missing one empty."""
        last = self.reference or ""
        return [*(answer for _, answer in self.history), last] if self.history else last


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Every row of a file of JSON lines (or of one JSON array, in a .json file) as a question.

    Raises:
        ValueError: no such file, no rows in it, or rows that are broken, of no known format or without a question; the
            first of them are named, all are counted.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"data file {str(path)!r} is no file; give one with a JSON object a line.")
    questions: list[Prompt] = []
    problems: list[InvalidRow] = []
    for row in read_rows(path):
        if isinstance(row, InvalidRow):
            problems.append(row)
            continue
        try:
            questions.append(parse_prompt(row.value))
        except InvalidRowError as error:
            problems.append(InvalidRow(location_of(row, error.path), error.reason, str(error)))
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems[:MAX_LISTED])
        raise ValueError(f"{len(problems)} bad row{'s' if len(problems) > 1 else ''} in the data file:\n{listed}")
    if not questions:
        raise ValueError(f"data file {str(path)!r} has no rows.")
    return questions


def parse_prompt(value: Any) -> Prompt:
    """Read a row in whichever known format it has, with its last answer or without.

    Raises:
        RowError: as `formats.parse_row`.
    """
    completed = _with_an_answer(value) if isinstance(value, dict) else None
    conversation: Conversation = parse_row(value if completed is None else completed)
    *history, (text, answer) = conversation.turns
    return Prompt(text, tuple(history), conversation.system, answer if completed is None else None)


def _with_an_answer(row: dict[str, Any]) -> dict[str, Any] | None:
    """The row with a stand-in for the answer it lacks; None where it lacks none (or is of no format at all)."""
    if "src" in row:
        return _complete_target(row)
    if "instruction" in row:
        return None if _is_said(row.get("output")) else {**row, "output": _STAND_IN}
    for key, role_key, asked, answer in (
        ("messages", "role", ("user",), {"role": "assistant", "content": _STAND_IN}),
        ("conversations", "from", ("human", "user"), {"from": "gpt", "value": _STAND_IN}),
    ):
        messages = row.get(key)
        if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
            return {**row, key: [*messages, answer]} if messages[-1].get(role_key) in asked else None
    return None


def _complete_target(row: dict[str, Any]) -> dict[str, Any] | None:
    source, target = row["src"], row.get("tgt")
    if not isinstance(source, list):
        return None if _is_said(target) else {**row, "tgt": _STAND_IN}
    targets = [] if target is None or target == "" else target
    if not isinstance(targets, list):
        return None
    if len(targets) == len(source) - 1:
        return {**row, "tgt": [*targets, _STAND_IN]}
    return None if not targets or _is_said(targets[-1]) else {**row, "tgt": [*targets[:-1], _STAND_IN]}


def _is_said(answer: Any) -> bool:
    return answer is not None and (not isinstance(answer, str) or bool(answer.strip()))


def encode_truncated_prompt(template: ChatTemplate, question: Prompt, max_tokens: int) -> tuple[list[int], bool]:
    """Prompt ids of at most `max_tokens`, and whether something was cut for it.

    The oldest turns go first; then the end of the question is cut, never what the template writes around it.

    Raises:
        ValueError: the template and the system prompt alone are longer.
    """
    history = question.history
    ids = template.encode_prompt(question.text, history, question.system)
    was_cut = len(ids) > max_tokens
    while len(ids) > max_tokens and history:
        history = history[1:]
        ids = template.encode_prompt(question.text, history, question.system)
    tokenizer = template.encoder.tokenizer
    text_ids = template.encoder.encode([question.text], [False])[0]
    while len(ids) > max_tokens and text_ids:
        text_ids = text_ids[: max(0, len(text_ids) - (len(ids) - max_tokens))]
        text = tokenizer.decode(text_ids, clean_up_tokenization_spaces=False)
        ids = template.encode_prompt(text, (), question.system)
    if len(ids) > max_tokens:
        raise ValueError(f"a prompt is {len(ids)} tokens long without its question, more than src_length {max_tokens}.")
    return ids, was_cut
