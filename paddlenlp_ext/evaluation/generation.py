"""Task of kind generation: answers are decoded greedily and compared with the right answers."""

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
    """Prompt with at least one right answer."""

    prompt: Prompt | str
    references: tuple[str, ...]


class Generation(Task):
    """Task that scores generated answers."""

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        assert options.data_file is not None, "checked by TaskOptions"
        for name in options.metric_names:  # reports a missing library before answers are generated
            score_answers(name, ["a"], [["a"]])
        self.questions = parse_file(options.data_file, lambda value: read_open_question(value, options), options.limit)
        self.prompts = [prompt_text(question.prompt) for question in self.questions]
        self.references = [question.references[0] for question in self.questions]

    def encode(self, encoder: PromptEncoder) -> list[list[int]]:
        """Return the token ids of each prompt."""
        return self.encode_rows(
            lambda question: encoder.prompt(question.prompt, self.options.max_new_tokens), self.questions
        )

    def num_units(self, encoded: list[list[int]]) -> int:
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
        """Generate the answers; return them with their scores."""
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
    """Return the text that a pattern extracts from each right answer; an answer without a match stays whole."""
    extracted = [extract(text, pattern) for text in references]
    return [text if match is None else match for text, match in zip(references, extracted, strict=True)]


def cut_at(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    ends = [found for stop in stops if (found := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def read_open_question(value: Any, options: TaskOptions) -> OpenQuestion:
    """Return the question of a row; without `options.prompt`, the last answer of the row is the right one.

    Raises:
        InvalidRowError: the row lacks a field or an answer, or the metric `number` finds no number in the answer.
    """
    row = read_object(value, ())
    prompt = read_prompt(row, options)
    if options.prompt is None:
        assert isinstance(prompt, Prompt), "rows in a fine-tuning format are conversations"
        references = [prompt.reference or ""]
        if not references[0].strip():
            raise InvalidRowError(INVALID_ANSWER, "the row has no answer to compare with; add one")
    else:
        references = read_answers(row, options)
    extracted = extract_references(references, options.pattern)
    if "number" in options.metric_names and any(last_number(text) is None for text in extracted):
        raise InvalidRowError(INVALID_ANSWER, "the metric number needs a number in the answer of the row")
    return OpenQuestion(prompt, tuple(references))
