"""Tokenized rows, and the documents that they form in a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddlenlp_ext.utils.json_reader import Location
from paddlenlp_ext.utils.labels import IGNORED_LABEL


@dataclass(frozen=True)
class Document:
    """Contiguous positions of a row in a batch, with causal attention within the document.

    Attributes:
        input_ids: int [T].
        labels: int64 [T], the token that each position should predict, or -100 where no loss is computed.
        first_position: offset in the position ids of the row at which the document starts.
        parent: index, among the documents of the row, of the document that this document continues and attends to;
            None: the document attends only to itself.
        answer: index of the document's answer among the answers of a preference row; -1: the document has no answer.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    first_position: int = 0
    parent: int | None = None
    answer: int = -1


@dataclass(frozen=True)
class EncodedRow:
    """Tokenized row.

    Attributes:
        tokens: int32 [L].
        loss_mask: bool [L], true for target tokens.
        row_index: index of the row in the dataset.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    row_index: int

    @property
    def length(self) -> int:
        """Number of positions of the row in a batch: its token count minus one."""
        return len(self.tokens) - 1

    @property
    def row_indices(self) -> tuple[int, ...]:
        """Indices of the rows in the dataset: this row."""
        return (self.row_index,)

    @property
    def documents(self) -> tuple[Document, ...]:
        """Documents of the row, in the order of their positions."""
        labels = np.where(self.loss_mask[1:], self.tokens[1:], IGNORED_LABEL)
        return (Document(self.tokens[:-1], labels),)

    @property
    def parts(self) -> list[tuple[str, np.ndarray, np.ndarray]]:
        """Name, tokens and loss mask of each sequence of the row, for a preview; a single sequence has no name."""
        return [("", self.tokens, self.loss_mask)]


@dataclass(frozen=True)
class TokenizedRow:
    """Tokenized example of a row, as stored in the token cache.

    Attributes:
        location: location of the row in its file.
        tokens: int32 [L].
        loss_mask: bool [L], true for target tokens; always false for the first token.
        answer_start: index of the first token of the last target answer, where generation starts.
        last_turn: index of the last target answer among the answers of the untruncated row.
        num_truncated_tokens: number of tokens that truncation removed.
        part: index of the example among the examples of the row.
        num_thoughts: number of target answers with reasoning.
        num_tool_calls: number of tool calls in target answers.
        num_empty_thoughts: number of target answers after an empty reasoning block that is excluded from the loss.
        num_truncated_target_tokens: number of target tokens that truncation removed.
    """

    location: Location
    tokens: np.ndarray
    loss_mask: np.ndarray
    answer_start: int = 0
    last_turn: int = 0
    num_truncated_tokens: int = 0
    part: int = 0
    num_thoughts: int = 0
    num_tool_calls: int = 0
    num_empty_thoughts: int = 0
    num_truncated_target_tokens: int = 0

    @property
    def parts(self) -> list[tuple[str, np.ndarray, np.ndarray]]:
        """Name, tokens and loss mask of each sequence of the example, for a preview; a single sequence has no name."""
        return [("", self.tokens, self.loss_mask)]

    @property
    def answers(self) -> tuple[int, ...]:
        """Integers that the token cache stores for the example; see `TokenArrays.answers`."""
        return self.answer_start, self.last_turn

    @property
    def values(self) -> tuple[float, ...]:
        """Floats that the token cache stores for the example, such as the margin of a preference pair."""
        return ()
