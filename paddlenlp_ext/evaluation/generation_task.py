"""Task that decodes an answer to each prompt greedily, and compares the answer with the reference answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.data.prediction_prompts import Prompt, parse_file
from paddlenlp_ext.data.rows.checked_values import read_object
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.evaluation.metrics import extract, score_answers
from paddlenlp_ext.evaluation.prompt_encoder import PromptEncoder
from paddlenlp_ext.evaluation.rows_to_prompts import INVALID_ANSWER, prompt_text, read_answers, read_prompt
from paddlenlp_ext.evaluation.task import Measured, Task
from paddlenlp_ext.evaluation.task_options import TaskOptions
from paddlenlp_ext.utils.last_number import last_number


@dataclass(frozen=True)
class OpenQuestion:
    """Prompt with at least one reference answer."""

    prompt: Prompt | str
    references: tuple[str, ...]


class Generation(Task):
    """Task that scores generated answers."""

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        assert options.data_file is not None, "checked by TaskOptions"
        for name in options.metric_names:  # fails early if a library is not installed
            score_answers(name, ["a"], [["a"]])
        self.questions = parse_file(options.data_file, lambda value: read_open_question(value, options), options.limit)
        self.prompts = [prompt_text(question.prompt) for question in self.questions]
        self.references = [question.references[0] for question in self.questions]

    def encode(self, encoder: PromptEncoder) -> list[list[int]]:
        return self.encode_rows(
            lambda question: encoder.prompt(question.prompt, self.options.max_new_tokens), self.questions
        )

    def num_units(self, encoded: list[list[int]]) -> int:
        return len(encoded)

    def measure(
        self,
        model: Any,
        encoded: list[list[int]],
        encoder: PromptEncoder,
        batch_size: int,
        advance: Callable[[int], object],
    ) -> Measured:
        generated = model.generate(
            encoded,
            max_new_tokens=self.options.max_new_tokens,
            batch_size=batch_size,
            on_row=lambda _, __: advance(1),
        )
        outputs = [cut_at(encoder.decode(ids), self.options.stop) for ids in generated]
        extracted = [extract(output, self.options.pattern) for output in outputs]
        references = [extract_references(question.references, self.options.pattern) for question in self.questions]
        scores = {name: score_answers(name, extracted, references) for name in self.options.metric_names}
        return Measured(scores, outputs)


def extract_references(references: Sequence[str], pattern: str | None) -> list[str]:
    """Return the result of `extract` for each reference answer, or the whole answer if `pattern` does not match."""
    extracted = [extract(text, pattern) for text in references]
    return [text if match is None else match for text, match in zip(references, extracted, strict=True)]


def cut_at(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string, or the whole text if no stop string occurs."""
    ends = [found for stop in stops if (found := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def read_open_question(value: Any, options: TaskOptions) -> OpenQuestion:
    """Return the question of a row.

    The reference answers are in the field `options.answer`. If `options.prompt` is None, the row is a conversation,
    and its last answer is the reference.

    Raises:
        InvalidRowError: the row lacks a field or an answer, or the metric `number` is used and a reference answer
            contains no number.
    """
    row = read_object(value, ())
    prompt = read_prompt(row, options)
    if options.prompt is None:
        assert isinstance(prompt, Prompt), "a row in a fine-tuning format must be a conversation"
        references = [prompt.reference or ""]
        if not references[0].strip():
            raise InvalidRowError(INVALID_ANSWER, "the row has no reference answer; add an answer")
    else:
        references = read_answers(row, options)
    extracted = extract_references(references, options.pattern)
    if "number" in options.metric_names and any(last_number(text) is None for text in extracted):
        raise InvalidRowError(
            INVALID_ANSWER, "a reference answer contains no number; add a number, or remove number from metrics"
        )
    return OpenQuestion(prompt, tuple(references))
