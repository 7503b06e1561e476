"""Base class of evaluation tasks, which read rows, encode them for a model and score the model."""

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
        outputs: answer of the model to each row; None for a perplexity task.
    """

    scores: Mapping[str, Scores]
    outputs: Sequence[str] | None = None


class Task(ABC):
    """Evaluation task. The constructor reads and checks the rows.

    Attributes:
        options: options of the task.
        prompts: text of each row's prompt; empty for a perplexity task.
        references: reference answer of each row; empty for a perplexity task.
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
        """Return the scores and the answers of a model.

        Args:
            model: a language model.
            encoded: the rows, encoded for the model by `encode`.
            encoder: the encoder that encoded the rows.
            batch_size: rows per batch.
            advance: progress callback, which takes the number of newly finished units (see `num_units`).
        """

    @abstractmethod
    def num_units(self, encoded: Any) -> int:
        """Return the length of the progress bar, in units such as prompts, choices or windows."""

    def encode_rows(self, encode: Callable[[Any], Any], rows: Sequence[Any]) -> list[Any]:
        """Return `encode(row)` for each row. Error messages name the task and the row."""
        encoded = []
        for number, row in enumerate(rows, start=1):
            try:
                encoded.append(encode(row))
            except ValueError as error:
                raise ValueError(f"{self.options.title}: row {number}: {error}") from error
        return encoded
