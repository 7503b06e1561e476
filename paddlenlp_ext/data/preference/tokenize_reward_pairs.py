"""Rows of reward models: pairs of answers, of which the last tokens are scored.

They take the positions of preference data (tokenized_pair.py), and one more for the last token of each answer:

    document           0   | 1       | 2
    parent             -   | 0       | 0
    input_ids          p q | s c d e | s r t
    labels             - - | c d e - | r t -
    position_ids       0 1 | 2 3 4 5 | 2 3 4
    scored                 |       * |     *

An answer ends as in the text of the chat template: what the template writes after its end token, such as a line break,
belongs to it. A row may have a number `margin`, by which the rewards of its answers should at least differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext.config.sections.preference import PreferenceDataConfig
from paddlenlp_ext.config.sections.reward import RewardConfig
from paddlenlp_ext.data.preference.pair_dataset import PreferenceDataset, load_pairs
from paddlenlp_ext.data.preference.parse_pairs import FORMATS, Answer, parse_preference, unknown_preference_fields
from paddlenlp_ext.data.preference.tokenize_pairs import PreferenceEncoder, TokenizedPreference
from paddlenlp_ext.data.preference.tokenized_pair import EncodedPreference
from paddlenlp_ext.data.readers.base import Reader
from paddlenlp_ext.data.readers.in_memory import Rows
from paddlenlp_ext.data.rows.checked_values import WRONG_TYPE
from paddlenlp_ext.data.rows.errors import MAX_LISTED, InvalidRowError
from paddlenlp_ext.data.rows.formats import parse_row
from paddlenlp_ext.data.rows.known_fields import NOT_SUPPORTED
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow
from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.data.templates.loss_mask import EncodedTurn, join_turns
from paddlenlp_ext.data.tokenization.encoded_row import Document
from paddlenlp_ext.data.tokenization.statistics import DataStats
from paddlenlp_ext.data.tokenization.token_arrays import TokenArrays
from paddlenlp_ext.utils.labels import IGNORED_LABEL

MARGIN = "margin"


@dataclass(frozen=True, kw_only=True)
class ScoredPair(EncodedPreference):
    """Tokenized row of a reward model; the documents of its answers have their last tokens.

    Attributes:
        margin: difference by which the chosen answer's reward should at least be greater.
    """

    margin: float = 0.0

    @property
    def length(self) -> int:
        """Number of positions that the row takes in a batch."""
        return super().length + len(self.answer_starts)

    def answer_document(self, prompt: np.ndarray, number: int) -> Document:
        """Return the document of an answer after `prompt`, with a position for its last token, without label."""
        document = super().answer_document(prompt, number)
        return Document(
            np.append(document.input_ids, self.answers[number][0][-1]),
            np.append(document.labels, IGNORED_LABEL),
            answer=number,
        )


@dataclass(frozen=True, kw_only=True)
class TokenizedScoredPair(TokenizedPreference):
    """Tokenized row of a reward model, ready to be stored.

    Attributes:
        margin: as for `ScoredPair`.
    """

    margin: float

    @property
    def answers(self) -> tuple[int, ...]:
        """Numbers that are stored about the answers of the row; the store has integers, so the margin is its bits."""
        return (*super().answers, int(np.float64(self.margin).view(np.int64)))


@dataclass(frozen=True)
class RewardEncoder(PreferenceEncoder):
    """Encoder of blocks of rows of a reward model."""

    num_answers = 4

    def parse(self, value: Any) -> tuple[Answer, ...]:
        """Return the two answers of a row, the chosen one first.

        Raises:
            InvalidRowError: the row is invalid or has one answer.
        """
        answers = parse_preference(value)
        if len(answers) < 2:
            message = "the row has one answer, and a reward model learns from two; add the other answer"
            raise InvalidRowError(NOT_SUPPORTED, message)
        margin_of(value)
        return answers

    def join(self, turns: Sequence[EncodedTurn]) -> tuple[list[int], list[bool]]:
        """Return tokens and loss mask of an answer with its prompt, to the end of the template's text."""
        tokens, loss_mask = join_turns(turns)
        return [*tokens, *self.template.tail_ids], [*loss_mask, *(False for _ in self.template.tail_ids)]

    def num_extra_positions(self, num_answers: int) -> int:
        """Return 1 if answers share their prompt, whose last token then has a position in each of them."""
        return num_answers - 1 if self.share_prompt else 0

    def finished(self, row: SourceRow, tokenized: TokenizedPreference) -> TokenizedPreference:
        """Return the row with its margin."""
        return TokenizedScoredPair(**vars(tokenized), margin=margin_of(row.value))

    def unknown_fields(self, row: Any) -> Iterator[str]:
        """Yield each field of a row that has no effect and is not metadata."""
        return unknown_preference_fields(row, read=(MARGIN,))


@dataclass(frozen=True)
class ScoringEncoder(RewardEncoder):
    """Encoder of rows to score: preference data, or rows of fine-tuning, whose last answers are scored."""

    def parse(self, value: Any) -> tuple[Answer, ...]:
        """Return the answers of a row; of a pair, the chosen one first.

        Raises:
            InvalidRowError: the row is invalid.
        """
        if isinstance(value, dict) and not all(row_format.missing(value) for row_format in FORMATS):
            return parse_preference(value)
        conversation = parse_row(value)
        last = max(index for index, message in enumerate(conversation.messages) if message.is_answer)
        return (Answer(conversation.with_targets((last,)), True),)

    def pairs(self, rows: Iterable[SourceRow | InvalidRow]) -> list[ScoredPair]:
        """Return the tokenized rows, which have one answer or two.

        Raises:
            ValueError: rows are invalid; the message lists the first few and their number.
        """
        encoded = list(self.encode_rows(rows))
        if problems := [row for row in encoded if isinstance(row, InvalidRow)]:
            listed = "\n".join(f"  {problem}" for problem in problems[:MAX_LISTED])
            raise ValueError(f"{len(problems)} invalid row{'s' if len(problems) > 1 else ''}; fix them:\n{listed}")
        return [
            ScoredPair(
                tokens=row.tokens,
                loss_mask=row.loss_mask,
                row_index=index,
                answer_starts=(row.answer_start, row.second_start)[: 1 + (row.second_start < len(row.tokens))],
                is_desirable=(row.is_desirable, False)[: 1 + (row.second_start < len(row.tokens))],
            )
            for index, row in enumerate(encoded)
            if isinstance(row, TokenizedPreference)
        ]


def margin_of(row: dict[str, Any]) -> float:
    """Return the margin of a row, 0 if it has none.

    Raises:
        InvalidRowError: the margin is not a finite number.
    """
    margin = row.get(MARGIN)
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) < math.inf:
        message = f"{MARGIN} is not a number; write the least difference between the rewards, or remove it"
        raise InvalidRowError(WRONG_TYPE, message, (MARGIN,))
    return float(margin)


class RewardDataset(PreferenceDataset):
    """Tokenized rows of a reward model, mapped from disk; an item is a `ScoredPair`."""

    kind = "reward"
    encoder_class = RewardEncoder

    def __init__(
        self,
        arrays: TokenArrays,
        stats: DataStats,
        readers: Sequence[Reader],
        template: ChatTemplate,
        share_prompt: bool,
        cache_folder: Path,
    ) -> None:
        super().__init__(arrays, stats, readers, template, share_prompt, cache_folder)
        self.lengths = self.lengths + self.num_answers

    def __getitem__(self, index: int) -> ScoredPair:
        margin = float(np.int64(self._arrays.answers[index][3]).view(np.float64))
        return ScoredPair(**vars(super().__getitem__(index)), margin=margin)


def load_reward_dataset(
    config: PreferenceDataConfig,
    reward: RewardConfig,
    split: str,
    tokenizer: Any,
    template: ChatTemplate | None = None,
    fingerprint: str | None = None,
    rows: Rows | None = None,
) -> RewardDataset:
    """Tokenize a split for a reward model, or map its tokens from the cache; see `load_preference_dataset`."""
    return load_pairs(RewardDataset, config, reward.share_prompt, split, tokenizer, template, fingerprint, rows)
