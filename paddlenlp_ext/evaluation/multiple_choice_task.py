"""Multiple-choice task: the model answers with the choice that has the greatest score.

| metric | score |
|---|---|
| acc | log-likelihood of the choice |
| acc_norm | log-likelihood divided by the number of characters of the choice |

lm-evaluation-harness defines acc and acc_norm in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddlenlp_ext.data.prediction_prompts import Prompt, parse_file
from paddlenlp_ext.data.rows.checked_values import read_list, read_member, read_object
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.evaluation.log_likelihood import Continuation, log_likelihoods
from paddlenlp_ext.evaluation.prompt_encoder import PromptEncoder
from paddlenlp_ext.evaluation.prompt_template import as_text, fill_from_row
from paddlenlp_ext.evaluation.row_scores import SHARE, Scores
from paddlenlp_ext.evaluation.rows_to_prompts import INVALID_ANSWER, prompt_text, read_answers, read_prompt
from paddlenlp_ext.evaluation.task import Measured, Task
from paddlenlp_ext.evaluation.task_options import TaskOptions

INVALID_CHOICES = "invalid choices"


@dataclass(frozen=True)
class Question:
    """Prompt with its choices, and the indices of the correct choices."""

    prompt: Prompt | str
    choices: tuple[str, ...]
    right: frozenset[int]


class MultipleChoice(Task):
    """Task in which a model selects one of several given answers."""

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        assert options.data_file is not None, "checked by TaskOptions"
        self.questions = parse_file(options.data_file, lambda value: read_question(value, options), options.limit)
        self.prompts = [prompt_text(question.prompt) for question in self.questions]
        self.references = [question.choices[min(question.right)] for question in self.questions]

    def encode(self, encoder: PromptEncoder) -> list[list[Continuation]]:
        def choices_of(question: Question) -> list[Continuation]:
            delimiter = self.options.delimiter
            return [encoder.continuation(question.prompt, choice, delimiter) for choice in question.choices]

        return self.encode_rows(choices_of, self.questions)

    def num_units(self, encoded: list[list[Continuation]]) -> int:
        return sum(map(len, encoded))

    def measure(
        self,
        model: Any,
        encoded: list[list[Continuation]],
        encoder: PromptEncoder,
        batch_size: int,
        advance: Callable[[int], object],
    ) -> Measured:
        """Return the scores; the outputs are the choices selected by the first metric."""
        flat = [continuation for row in encoded for continuation in row]
        options = {"batch_size": batch_size, "max_length": encoder.max_length, "advance": advance}
        found = iter(log_likelihoods(model, flat, **options))
        logprobs = [np.array([next(found).logprob for _ in row]) for row in encoded]
        chosen = {name: self._chosen(logprobs, name) for name in self.options.metric_names}
        scores = {
            name: [float(index in question.right) for index, question in zip(indices, self.questions, strict=True)]
            for name, indices in chosen.items()
        }
        first = chosen[self.options.metric_names[0]]
        return Measured(
            {name: Scores.of_rows(SHARE, values) for name, values in scores.items()},
            [question.choices[index] for index, question in zip(first, self.questions, strict=True)],
        )

    def _chosen(self, logprobs: list[np.ndarray], metric: str) -> list[int]:
        """Return, for each question, the index of the choice with the greatest score."""
        if metric == "acc":
            return [int(np.argmax(row)) for row in logprobs]
        lengths = [np.array([len(choice) for choice in question.choices], float) for question in self.questions]
        return [int(np.argmax(row / length)) for row, length in zip(logprobs, lengths, strict=True)]


def read_question(value: Any, options: TaskOptions) -> Question:
    """Return the multiple-choice question of a row.

    Raises:
        InvalidRowError: the row lacks a field, has fewer than two choices or an empty choice, or the answer is not a
            choice.
    """
    row = read_object(value, ())
    prompt, choices = read_prompt(row, options), _read_choices(row, options)
    right = frozenset(_index_of(answer, choices, row, options) for answer in _read_right(row, options))
    return Question(prompt, choices, right)


def _read_choices(row: dict[str, Any], options: TaskOptions) -> tuple[str, ...]:
    path: tuple[str, ...] = ()
    if isinstance(options.choices, list):
        choices = [fill_from_row(text, row) for text in options.choices]
    else:
        path = (options.choices,)
        listed = read_list(read_member(row, options.choices, ()), path)
        choices = [as_text(choice, (*path, index)) for index, choice in enumerate(listed)]
    if len(choices) < 2:
        raise InvalidRowError(INVALID_CHOICES, f"the row has {len(choices)} choices, but needs at least two", path)
    if any(not choice for choice in choices):
        raise InvalidRowError(INVALID_CHOICES, f"choice {choices.index('')} is empty; add text", path)
    return tuple(choices)


def _read_right(row: dict[str, Any], options: TaskOptions) -> list[int | str]:
    value = read_member(row, options.answer, ())
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        return list(value)
    return list(read_answers(row, options))


def _index_of(answer: int | str, choices: tuple[str, ...], row: dict[str, Any], options: TaskOptions) -> int:
    """Return the index of the correct choice. `answer` is the index, a letter A, B, ..., or the text of the choice."""
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    index = answer if isinstance(answer, int) else ord(answer) - ord("A") if len(answer) == 1 else -1
    if not 0 <= index < len(choices):
        message = (
            f"{options.answer} {row[options.answer]!r} does not match any of the {len(choices)} choices; write the "
            "index (from 0), the letter (from A) or the text of a choice"
        )
        raise InvalidRowError(INVALID_ANSWER, message, (options.answer,))
    return index
