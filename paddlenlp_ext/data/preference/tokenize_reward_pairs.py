"""Tokenize training pairs of a reward model, and rows to score with a reward model.

The last token of each answer is scored (tokenized_pair.py). An answer includes the text that the chat template writes
after the end token, such as a line break. The field `margin` of a row is the minimum difference between the rewards of
its answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paddlenlp_ext.data.preference.pair_formats import FORMATS
from paddlenlp_ext.data.preference.parse_pairs import Answer, parse_preference, unknown_preference_fields
from paddlenlp_ext.data.preference.tokenize_pairs import PairRow, PreferenceEncoder
from paddlenlp_ext.data.preference.tokenized_pair import TokenizedPair
from paddlenlp_ext.data.rows.checked_values import WRONG_TYPE
from paddlenlp_ext.data.rows.errors import MAX_LISTED, NOT_SUPPORTED, InvalidRowError
from paddlenlp_ext.data.rows.row_formats import parse_row
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow
from paddlenlp_ext.data.templates.turns import EncodedTurn, join_turns

MARGIN = "margin"


@dataclass(frozen=True)
class RewardEncoder(PreferenceEncoder):
    """Encoder of pairs for a reward model."""

    num_values = 1
    rows_key = "reward, margin as a float"
    scores_last_tokens = True

    def parse(self, value: Any) -> tuple[Answer, ...]:
        """Return the two answers of a row, the chosen answer first.

        Raises:
            InvalidRowError: the row is invalid or has one answer.
        """
        answers = parse_preference(value)
        if len(answers) < 2:
            message = "the row has one answer, but a reward model needs a chosen and a rejected answer; add an answer"
            raise InvalidRowError(NOT_SUPPORTED, message)
        self.margin(value)
        return answers

    def join(self, turns: Sequence[EncodedTurn]) -> tuple[list[int], list[bool]]:
        """Return tokens and loss mask of an answer with its prompt, including the text after the end token."""
        tokens, loss_mask = join_turns(turns)
        return [*tokens, *self.template.tail_ids], [*loss_mask, *(False for _ in self.template.tail_ids)]

    def num_extra_positions(self, num_answers: int) -> int:
        """Return the number of additional positions: each answer has a copy of the last token of a shared prompt."""
        return num_answers - 1 if self.share_prompt else 0

    def margin(self, value: Any) -> float:
        """Return the field `margin` of a row, or 0.0 if it is not set.

        Raises:
            InvalidRowError: the margin is not a finite number.
        """
        margin = value.get(MARGIN)
        if margin is None:
            return 0.0
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) < math.inf:
            message = f"{MARGIN} is not a number; write the minimum difference between the rewards, or remove the field"
            raise InvalidRowError(WRONG_TYPE, message, (MARGIN,))
        return float(margin)

    def unknown_fields(self, row: Any) -> Iterator[str]:
        """Yield the fields of a row that have no effect and are not metadata."""
        return unknown_preference_fields(row, read=(MARGIN,))


@dataclass(frozen=True)
class ScoringEncoder(RewardEncoder):
    """Encoder of rows to score: the answers of preference data, or the last answer of fine-tuning rows."""

    def parse(self, value: Any) -> tuple[Answer, ...]:
        """Return the answers of a row: a pair with the chosen answer first, or the last answer.

        Raises:
            InvalidRowError: the row is invalid.
        """
        if isinstance(value, dict) and not all(row_format.missing(value) for row_format in FORMATS):
            return parse_preference(value)
        conversation = parse_row(value)
        last = max(index for index, message in enumerate(conversation.messages) if message.is_answer)
        return (Answer(conversation.with_targets((last,)), True),)

    def pairs(self, rows: Iterable[SourceRow | InvalidRow]) -> list[TokenizedPair]:
        """Return the tokenized rows, each with one or two answers.

        Raises:
            ValueError: rows are invalid; the message lists the first invalid rows.
        """
        encoded = list(self.encode_rows(rows))
        if problems := [row for row in encoded if isinstance(row, InvalidRow)]:
            listed = "\n".join(f"  {problem}" for problem in problems[:MAX_LISTED])
            raise ValueError(f"{len(problems)} invalid row{'s' if len(problems) > 1 else ''}; fix them:\n{listed}")
        return [replace(row.pair, row_index=index) for index, row in enumerate(encoded) if isinstance(row, PairRow)]
