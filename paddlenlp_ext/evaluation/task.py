"""Interface of a task: read its rows, encode them for a model, and measure the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.evaluation.prompt_encoder import PromptEncoder
from paddlenlp_ext.evaluation.row_scores import Scores
from paddlenlp_ext.evaluation.task_options import TaskOptions


@dataclass(frozen=True)
class Measured:
    """Result of one model on one task.

    Attributes:
        scores: metric -> scores of the rows.
        outputs: answer to each row; None for perplexity.
    """

    scores: Mapping[str, Scores]
    outputs: Sequence[str] | None = None


class Task(ABC):
    """Rows of a task, read and checked.

    Attributes:
        options: options of the task.
        prompts: prompt of each row as text; of perplexity there is none.
        references: right answer of each row as text.
    """

    def __init__(self, options: TaskOptions) -> None:
        self.options = options
        self.prompts: Sequence[str] = ()
        self.references: Sequence[str] = ()

    @abstractmethod
    def encode(self, encoder: PromptEncoder) -> Any:
        """Return the rows as the tokens of a model.

        Raises:
            ValueError: the template does not write a row, or a row is too long.
        """

    @abstractmethod
    def measure(
        self, model: Any, encoded: Any, encoder: PromptEncoder, batch_size: int, advance: Callable[[int], object]
    ) -> Measured:
        """Return the scores of a model.

        Args:
            model: a language model.
            encoded: result of `encode` for this model.
            encoder: encoder of this model.
            batch_size: rows that are computed together.
            advance: called with the number of finished parts, of `num_parts`.
        """

    @abstractmethod
    def num_parts(self, encoded: Any) -> int:
        """Return the number of parts that a progress bar counts."""

    def encode_rows(self, encode: Callable[[Any], Any], rows: Sequence[Any]) -> list[Any]:
        """Return encode(row) of each row; an error names the task and the row."""
        encoded = []
        for number, row in enumerate(rows, start=1):
            try:
                encoded.append(encode(row))
            except ValueError as error:
                raise ValueError(f"{self.options.title}: row {number}: {error}") from error
        return encoded
