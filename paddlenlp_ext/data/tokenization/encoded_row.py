"""Tokenized rows: tokens with a loss mask, and the documents that they form in a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddlenlp_ext.utils.json_reader import Location
from paddlenlp_ext.utils.labels import IGNORED_LABEL


@dataclass(frozen=True)
class Document:
    """Contiguous positions of a row in a batch.

    Attributes:
        input_ids: int [T].
        labels: int64 [T], the token that each position should predict, or -100 where no loss is computed.
        first_position: position id of the first token; the following ids are consecutive.
        parent: index in the row of the document that this document continues; attention treats the tokens of
            the parent as preceding tokens. None: attention stays within the document.
        answer: index in the row of the answer that the labels belong to; -1: none.
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
        row_index: number of the row in its dataset.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    row_index: int

    @property
    def length(self) -> int:
        """Number of positions that the row takes in a batch: its number of tokens minus one."""
        return len(self.tokens) - 1

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
    """Tokenized example of a row, ready to be stored.

    Attributes:
        location: location of the row in its file.
        tokens: int32 [L].
        loss_mask: bool [L], true for target tokens; false for the first token, which no position predicts.
        answer_start: index of the first token that the model generates for the last target answer.
        last_turn: index of that answer among the answers of the untruncated row.
        num_truncated_tokens: number of tokens that truncation removed.
        part: index of the example among the examples of its row.
        num_thoughts: number of target answers with reasoning.
        num_tool_calls: number of tool calls in target answers.
        num_empty_thoughts: number of target answers after an empty reasoning block that is not a target.
        num_truncated_target_tokens: number of target tokens that truncation removed.
    """

    location: Location
    tokens: np.ndarray
    loss_mask: np.ndarray
    answer_start: int
    last_turn: int
    num_truncated_tokens: int
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
        """Integers stored about the answers of the example."""
        return self.answer_start, self.last_turn

    @property
    def values(self) -> tuple[float, ...]:
        """Floating-point values stored with the example, such as the margin of a preference pair."""
        return ()
