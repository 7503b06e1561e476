"""Generated answers, decoded greedily and compared with the right answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.data.prediction_prompts import Prompt, parse_file
from paddlenlp_ext.data.rows.checked_values import read_object
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.evaluation.metrics import extract, last_number, score_answers
from paddlenlp_ext.evaluation.prompt_encoder import PromptEncoder
from paddlenlp_ext.evaluation.task import Measured, Task
from paddlenlp_ext.evaluation.task_options import TaskOptions
from paddlenlp_ext.evaluation.task_rows import INVALID_ANSWER, prompt_text, read_answers, read_prompt


@dataclass(frozen=True)
class OpenQuestion:
    """Prompt and right answers, at least one."""

    prompt: Prompt | str
    references: tuple[str, ...]


class Generation(Task):
    """Task of kind generation."""

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        assert options.data_file is not None, "checked by TaskOptions"
        for name in options.metric_names:  # a missing library is reported before answers are generated
            score_answers(name, ["a"], [["a"]])
        self.questions = parse_file(options.data_file, lambda value: read_open_question(value, options), options.limit)
        self.prompts = [prompt_text(question.prompt) for question in self.questions]
        self.references = [question.references[0] for question in self.questions]

    def encode(self, encoder: PromptEncoder) -> list[list[int]]:
        """Return the ids of each prompt."""
        return self.encode_rows(
            lambda question: encoder.prompt(question.prompt, self.options.max_new_tokens), self.questions
        )

    def num_parts(self, encoded: list[list[int]]) -> int:
        """Return the number of prompts."""
        return len(encoded)

    def measure(
        self,
        model: Any,
        encoded: list[list[int]],
        encoder: PromptEncoder,
        batch_size: int,
        advance: Callable[[int], object],
    ) -> Measured:
        """Return the scores of the answers, and the answers."""
        generated = model.generate(
            encoded,
            max_new_tokens=self.options.max_new_tokens,
            batch_size=batch_size,
            on_row=lambda _, __: advance(1),
        )
        outputs = [cut_at(encoder.decode(ids), self.options.stop) for ids in generated]
        extracted = [extract(output, self.options.pattern) for output in outputs]
        references = [right_parts(question.references, self.options.pattern) for question in self.questions]
        scores = {name: score_answers(name, extracted, references) for name in self.options.metric_names}
        return Measured(scores, outputs)


def right_parts(references: Sequence[str], pattern: str | None) -> list[str]:
    """Return the parts of right answers that a pattern extracts; without a match, the answer itself."""
    extracted = [extract(text, pattern) for text in references]
    return [text if part is None else part for text, part in zip(references, extracted, strict=True)]


def cut_at(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first occurrence of any of `stops`."""
    ends = [found for stop in stops if (found := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def read_open_question(value: Any, options: TaskOptions) -> OpenQuestion:
    """Return the question of a row; without `options.prompt`, its right answer is the last answer of the row.

    Raises:
        InvalidRowError: the row lacks a field or an answer, or no number is in it though the metric compares numbers.
    """
    row = read_object(value, ())
    prompt = read_prompt(row, options)
    if options.prompt is None:
        assert isinstance(prompt, Prompt), "rows in a format of training are conversations"
        references = [prompt.reference or ""]
        if not references[0].strip():
            raise InvalidRowError(INVALID_ANSWER, "the row has no answer to compare with; add one")
    else:
        references = read_answers(row, options)
    parts = right_parts(references, options.pattern)
    if "number" in options.metric_names and any(last_number(part) is None for part in parts):
        raise InvalidRowError(INVALID_ANSWER, "the metric number needs a number in the answer of the row")
    return OpenQuestion(prompt, tuple(references))
