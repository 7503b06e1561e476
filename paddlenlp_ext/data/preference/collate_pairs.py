"""Collate preference data into batches that assign each target position to an answer.

`PreferenceBatch.answer_index` numbers the answers of a batch in reading order: pair i has the answers 2i (chosen) and
2i + 1 (rejected). The log-probability of an answer is the sum of the log-probabilities of its target tokens.

KTO estimates a baseline from mismatched prompts and answers. As in TRL, each prompt of the batch is combined with the
answer of the previous row, and the first prompt with the last answer. Example with prompts x and answers y:

    rows         (x1, y1)  (x2, y2)  (x3, y3)
    mismatched   (x1, y3)  (x2, y1)  (x3, y2)

The mismatched rows form a second batch, for a forward pass without gradients. If the rows are pairs, each prompt is
combined with both answers of the previous pair.

Shapes: B batch size, S positions of a batch row, A answers of a batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paddlenlp_ext.data.collate import PackedBatch, batch_rows_of, collate
from paddlenlp_ext.data.preference.tokenized_pair import TokenizedPair
from paddlenlp_ext.utils.labels import IGNORED_LABEL


@dataclass(frozen=True, kw_only=True)
class PreferenceBatch(PackedBatch):
    """Arrays of a micro-batch of preference data.

    Attributes:
        answer_index: int64 [B, S], index of the answer to which each position's target token belongs; -1: no target.
        is_desirable: bool [A], True for answers that are chosen or rated as good.
        reference_logps: float32 [A], log-probabilities of the answers under the reference model; None: unknown.
        mismatched: batch of mismatched prompts and answers, for KTO; None for other losses.
        baseline: KTO's estimate of the KL divergence, computed from `mismatched`; None until it is computed.
    """

    answer_index: np.ndarray
    is_desirable: np.ndarray
    reference_logps: np.ndarray | None = None
    mismatched: PreferenceBatch | None = None
    baseline: float | None = None

    @property
    def num_answers(self) -> int:
        return len(self.is_desirable)

    @property
    def answer_lengths(self) -> np.ndarray:
        """Number of target tokens of each answer, int64 [A]."""
        return np.bincount(self.answer_index[self.answer_index >= 0], minlength=self.num_answers)


def collate_pairs(
    packs: Sequence[Sequence[TokenizedPair]],
    *,
    pad_to_multiple_of: int | None = None,
    pad_to_length: int | None = None,
    pad_token_id: int = 0,
    reference_logps: np.ndarray | None = None,
    with_mismatched: bool = False,
) -> PreferenceBatch:
    """Concatenate the pairs of a micro-batch.

    Args:
        packs: packs of the micro-batch, each a list of rows.
        pad_to_multiple_of, pad_to_length, pad_token_id: see `collate`.
        reference_logps: float32 [rows of the dataset, 2], log-probabilities of the answers of each row under the
            reference model; None: unknown.
        with_mismatched: whether to add the batch of mismatched prompts and answers, for KTO.

    Raises:
        ValueError: a pack has more positions than `pad_to_length`.
    """
    batch = collate(
        packs, pad_to_multiple_of=pad_to_multiple_of, pad_to_length=pad_to_length, pad_token_id=pad_token_id
    )
    rows = list(itertools.chain.from_iterable(packs))
    known = None
    if reference_logps is not None:
        answers = [reference_logps[row.row_index, : len(row.answer_starts)] for row in rows]
        known = np.concatenate(answers).astype(np.float32)
    mismatched = None
    if with_mismatched:
        mismatched = collate_pairs(
            [mismatched_rows(rows)], pad_to_multiple_of=pad_to_multiple_of, pad_token_id=pad_token_id
        )
    return PreferenceBatch(
        **vars(batch),
        answer_index=answer_index_of(batch_rows_of(packs, pad_to_length), batch),
        is_desirable=np.array([flag for row in rows for flag in row.is_desirable], dtype=bool),
        reference_logps=known,
        mismatched=mismatched,
    )


def answer_index_of(batch_rows: Sequence[Sequence[TokenizedPair]], batch: PackedBatch) -> np.ndarray:
    """Return `PreferenceBatch.answer_index` of the batch that collates `batch_rows`."""
    index = np.full(batch.labels.shape, -1, dtype=np.int64)
    first = 0
    for batch_index, rows in enumerate(batch_rows):
        start = 0
        for row in rows:
            for document in row.documents:
                end = start + len(document.input_ids)
                if document.answer >= 0:
                    index[batch_index, start:end] = first + document.answer
                start = end
            first += len(row.answer_starts)
    index[batch.labels == IGNORED_LABEL] = -1
    return index


def mismatched_rows(rows: Sequence[TokenizedPair]) -> list[TokenizedPair]:
    """Return rows of mismatched prompts and answers: each prompt is combined with the answers of the previous row.

    A single row keeps its own answers; KTO's baseline is then estimated from these answers.
    """
    prompts = [row.prompt for row in rows for _ in row.answers]
    answers = [answer for row in rows for answer in row.answers]
    shift = max(len(row.answer_starts) for row in rows)
    return [
        TokenizedPair(
            tokens=np.concatenate([prompt, tokens]),
            loss_mask=np.concatenate([np.zeros(len(prompt), bool), loss_mask]),
            row_index=-1,
            answer_starts=(len(prompt),),
            is_desirable=(False,),
        )
        for prompt, (tokens, loss_mask) in zip(prompts, [*answers[-shift:], *answers[:-shift]], strict=True)
    ]
