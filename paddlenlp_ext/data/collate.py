"""Encoded rows to one batch, without padding unless it is asked for.

Shapes: B batch, S slots of a batch row, L tokens of a dataset row.

A dataset row of L tokens is a document of L - 1 slots: slot t holds token t and is to predict token t + 1. The shift is
done here, once; the model and the loss never shift.

Dataset rows to batches, the way `config.data` asks for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paddlenlp_ext.config.sections import DataConfig
from paddlenlp_ext.data.dataset import TokenizedDataset
from paddlenlp_ext.data.types import EncodedRow
from paddlenlp_ext.utils.labels import IGNORED_LABEL, prompt_lengths_of


@dataclass(frozen=True)
class PackedBatch:
    """What a training step reads.

    Attributes:
        input_ids: int64 [B, S].
        labels: int64 [B, S], the token each slot is to predict, or -100 where nothing is learned.
        position_ids: int64 [B, S], counted from zero in every document.
        document_lengths: for each batch row the lengths of its documents; they sum to S, and trailing padding
            counts as one more document.
        row_indices: the dataset rows inside, in order, for messages.
        num_tokens: slots that hold a token of the data.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    document_lengths: tuple[tuple[int, ...], ...]
    row_indices: tuple[int, ...]
    num_tokens: int

    @property
    def num_positions(self) -> int:
        """B x S, padding included."""
        return int(self.input_ids.size)

    @property
    def num_target_tokens(self) -> int:
        """Slots whose prediction counts in the loss."""
        return int(np.count_nonzero(self.labels != IGNORED_LABEL))

    @property
    def prompt_lengths(self) -> tuple[tuple[int, ...], ...]:
        """For each document how many slots hold its prompt: what precedes its last answer. 0 in padding.

        The slot that predicts the answer's first token is the prompt's last, as it is when the answer is generated.
        """
        return prompt_lengths_of(self.labels, self.document_lengths)


def collate(
    packs: Sequence[Sequence[EncodedRow]],
    *,
    pad_to_multiple_of: int | None = None,
    pad_to_length: int | None = None,
    pad_token_id: int = 0,
) -> PackedBatch:
    """Concatenate the rows of a micro-batch.

    Without padding options, and with `pad_to_multiple_of`, the batch is one row holding all documents (B = 1). With
    `pad_to_length` every pack becomes a batch row of that many slots (B = number of packs).

    Args:
        packs: the micro-batch; each pack is a list of rows.
        pad_to_multiple_of: make S a multiple of this by one padding document at the end.
        pad_to_length: S of every batch row.
        pad_token_id: what padding slots hold; they are never learned.

    Raises:
        ValueError: a pack has more slots than `pad_to_length`.
    """
    assert packs and all(packs), "a micro-batch holds at least one row, and so does every pack"
    if pad_to_length is None:
        batch_rows = [[row for pack in packs for row in pack]]
        num_positions = sum(row.length for row in batch_rows[0])
    else:
        batch_rows = [list(pack) for pack in packs]
        num_positions = pad_to_length
    if pad_to_multiple_of is not None:
        num_positions = -(-num_positions // pad_to_multiple_of) * pad_to_multiple_of
    return _fill(batch_rows, num_positions, pad_token_id)


def _fill(batch_rows: list[list[EncodedRow]], num_positions: int, pad_token_id: int) -> PackedBatch:
    shape = (len(batch_rows), num_positions)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    all_lengths: list[tuple[int, ...]] = []
    num_tokens = 0
    for batch_index, rows in enumerate(batch_rows):
        lengths = [row.length for row in rows]
        used = sum(lengths)
        if used > num_positions:
            named = ", ".join(str(row.row_index) for row in rows)
            raise ValueError(
                f"rows {named} take {used} positions, more than the {num_positions} to pad to; lower max_length"
            )
        start = 0
        for row in rows:
            assert row.length >= 1, f"row {row.row_index} has {len(row.tokens)} tokens: nothing to predict"
            end = start + row.length
            input_ids[batch_index, start:end] = row.tokens[:-1]
            labels[batch_index, start:end] = np.where(row.loss_mask[1:], row.tokens[1:], IGNORED_LABEL)
            position_ids[batch_index, start:end] = np.arange(row.length)
            start = end
        if used < num_positions:
            position_ids[batch_index, used:] = np.arange(num_positions - used)
            lengths.append(num_positions - used)
        all_lengths.append(tuple(lengths))
        num_tokens += used
    row_indices = tuple(row.row_index for rows in batch_rows for row in rows)
    return PackedBatch(input_ids, labels, position_ids, tuple(all_lengths), row_indices, num_tokens)


Collate = Callable[[Sequence[Sequence[int]]], PackedBatch]
"""From a micro-batch (packs of row indices) to its batch."""


def build_collate(rows: TokenizedDataset, data: DataConfig, pad_token_id: int, vocab_size: int) -> Collate:
    """Collation of `rows` (a TokenizedDataset) under the padding options of `config.data`.

    It refuses tokens that a model of `vocab_size` has not: a vocabulary that is cut would find no row for them, and say
    nothing.
    """
    pad_to_length = data.max_length if data.pad_to_max_length else None

    def collate_rows(micro_batch: Sequence[Sequence[int]]) -> PackedBatch:
        packs = [[rows[index] for index in pack] for pack in micro_batch]
        for row in itertools.chain.from_iterable(packs):
            if (largest := int(row.tokens.max())) >= vocab_size:
                raise ValueError(_outside(rows, row.row_index, largest, vocab_size))
        return collate(
            packs,
            pad_to_multiple_of=data.pad_to_multiple_of,
            pad_to_length=pad_to_length,
            pad_token_id=pad_token_id,
        )

    return collate_rows


def _outside(rows: TokenizedDataset, index: int, token: int, vocab_size: int) -> str:
    file, line = rows.source(index)
    return (
        f"row {index} ({file}:{line}) has the token id {token}, and the model's vocabulary has {vocab_size}: this "
        "tokenizer is not the model's, or has tokens that the model was not extended by"
    )
