"""Base class of tasks: read the rows, encode them for a model, and measure the model."""

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
    """Task with its rows, which the constructor reads and checks.

    Attributes:
        options: options of the task.
        prompts: prompt of each row as text; empty for perplexity.
        references: right answer of each row as text; empty for perplexity.
    """

    def __init__(self, options: TaskOptions) -> None:
        self.options = options
        self.prompts: Sequence[str] = ()
        self.references: Sequence[str] = ()

    @abstractmethod
    def encode(self, encoder: PromptEncoder) -> Any:
        """Encode the rows with a model's tokenizer and chat template.

        Raises:
            ValueError: the template cannot render a row, or a row is too long.
        """

    @abstractmethod
    def measure(
        self, model: Any, encoded: Any, encoder: PromptEncoder, batch_size: int, advance: Callable[[int], object]
    ) -> Measured:
        """Return the scores and the outputs of a model.

        Args:
            model: a language model.
            encoded: result of `encode` for this model.
            encoder: encoder of this model.
            batch_size: rows computed together.
            advance: called with the number of newly finished units.
        """

    @abstractmethod
    def num_units(self, encoded: Any) -> int:
        """Return the number of units that a progress bar counts."""

    def encode_rows(self, encode: Callable[[Any], Any], rows: Sequence[Any]) -> list[Any]:
        """Apply `encode` to each row; errors name the task and the row."""
        encoded = []
        for number, row in enumerate(rows, start=1):
            try:
                encoded.append(encode(row))
            except ValueError as error:
                raise ValueError(f"{self.options.title}: row {number}: {error}") from error
        return encoded
