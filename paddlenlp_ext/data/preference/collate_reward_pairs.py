"""Collate preference pairs into batches for a reward model.

Shapes: B batch size, S positions of a batch row, A answers of a batch, P pairs of a batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paddlenlp_ext.data.collate import PackedBatch, batch_rows_of, collate
from paddlenlp_ext.data.preference.tokenized_pair import TokenizedPair


@dataclass(frozen=True, kw_only=True)
class RewardBatch(PackedBatch):
    """Arrays of a micro-batch for a reward model; pair i has the answers 2i (chosen) and 2i + 1 (rejected).

    Attributes:
        scored: int64 [A], for each answer, the index of the scored position in the flattened batch.
        margins: float32 [P], minimum difference between the rewards of each pair.
    """

    scored: np.ndarray
    margins: np.ndarray

    @property
    def loss_positions(self) -> np.ndarray:
        """Indices of the scored positions in the flattened batch, int64 [A]."""
        return self.scored


def collate_reward_pairs(
    packs: Sequence[Sequence[TokenizedPair]],
    *,
    pad_to_multiple_of: int | None = None,
    pad_to_length: int | None = None,
    pad_token_id: int = 0,
    unscored_token_id: int | None = None,
) -> RewardBatch:
    """Concatenate the pairs of a micro-batch.

    Args:
        packs: packs of the micro-batch, each a list of rows.
        pad_to_multiple_of, pad_to_length, pad_token_id: see `collate`.
        unscored_token_id: `pad_token_id` of config.json. As in transformers, this token counts as padding, even if it
            is also the end token; the score is taken at the last other token.

    Raises:
        ValueError: a pack has more positions than `pad_to_length`.
    """
    batch = collate(
        packs, pad_to_multiple_of=pad_to_multiple_of, pad_to_length=pad_to_length, pad_token_id=pad_token_id
    )
    scored = []
    for batch_index, rows in enumerate(batch_rows_of(packs, pad_to_length)):
        start = batch_index * batch.input_ids.shape[1]
        for document in itertools.chain.from_iterable(row.documents for row in rows):
            if document.answer >= 0:
                scored.append(start + last_scored(document.input_ids, unscored_token_id))
            start += len(document.input_ids)
    margins = [row.margin for row in itertools.chain.from_iterable(packs)]
    return RewardBatch(**vars(batch), scored=np.array(scored, np.int64), margins=np.array(margins, np.float32))


def last_scored(tokens: np.ndarray, unscored_token_id: int | None) -> int:
    """Return the index of the last token other than `unscored_token_id`, or the last index if there is none."""
    others = np.flatnonzero([token != unscored_token_id for token in tokens.tolist()])
    return int(others[-1]) if len(others) else len(tokens) - 1
