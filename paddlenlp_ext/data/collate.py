"""Collate the packs of a micro-batch into the arrays of one batch.

A row of L tokens is a document of L - 1 positions: position t holds token t, and the label of the position is token
t + 1. Labels are shifted in this module, not in the model or the loss. Documents are concatenated without padding.
Example with rows of four and three tokens (`*` marks target tokens):

    row 0: a b c* d*          row 1: x y* z

    input_ids          a   b   c | x   y
    labels             -   c   d | y   -         - is -100: no loss at this position
    position_ids       0   1   2 | 0   1         start at 0 in each document
    document_lengths   3         | 2
    attention          1         |               causal within a document
                       1   1     |
                       1   1   1 |
                       ----------+------
                                 | 1
                                 | 1   1

The attention mask is not materialized; attention receives `document_lengths` instead.

Shapes: B batch size, S positions of a batch row, L tokens of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.data.pose import PositionSkips
from paddlenlp_ext.data.shared_prefixes import PrefixedRows
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.data.training_rows import TrainingRows
from paddlenlp_ext.utils.labels import IGNORED_LABEL
from paddlenlp_ext.utils.prompt_lengths import compute_prompt_lengths

RowT = TypeVar("RowT", bound=EncodedRow | PrefixedRows)


@dataclass(frozen=True)
class PackedBatch:
    """Arrays of a micro-batch.

    Attributes:
        input_ids: int64 [B, S].
        labels: int64 [B, S], the token that each position should predict, or -100 where no loss is computed.
        position_ids: int64 [B, S], from 0 in a document without a parent, and from the parent's length in a document
            with a parent (`document_parents`). PoSE (pose.py) skips position ids.
        document_lengths: lengths of the documents of each batch row, with sum S; trailing padding is the last document.
        row_indices: dataset indices of the rows, in batch order.
        num_tokens: number of positions that are not padding.
        document_parents: for each document of a batch row, the index of the document that it continues and attends to,
            or None. `document_parents` is None if no document of the batch continues another document.
        padding: number of padding positions at the end of each batch row.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    document_lengths: tuple[tuple[int, ...], ...]
    row_indices: tuple[int, ...]
    num_tokens: int
    document_parents: tuple[tuple[int | None, ...], ...] | None = None
    padding: tuple[int, ...] = ()

    @property
    def token_mask(self) -> np.ndarray:
        """Mask that is False at padding positions, bool [B, S]."""
        ends_B1 = self.input_ids.shape[1] - np.array(self.padding or (0,))[:, None]
        return np.arange(self.input_ids.shape[1]) < np.broadcast_to(ends_B1, (len(self.input_ids), 1))

    @property
    def num_positions(self) -> int:
        """Number of positions including padding: B x S."""
        return int(self.input_ids.size)

    @property
    def num_target_tokens(self) -> int:
        """Number of positions that contribute to the loss."""
        return int(np.count_nonzero(self.labels != IGNORED_LABEL))

    @property
    def loss_positions(self) -> np.ndarray:
        """Indices of the positions with a label in the flattened batch, int64 [R], ascending."""
        return np.flatnonzero(self.labels != IGNORED_LABEL)

    @property
    def prompt_lengths(self) -> tuple[tuple[int, ...], ...]:
        """Number of positions of each document before its last answer; 0 for padding.

        The position that predicts the first token of the answer is part of the prompt, as in generation.
        """
        return compute_prompt_lengths(self.labels, self.document_lengths, self.document_parents)


Positions = Callable[[Any], np.ndarray]


def consecutive(row: EncodedRow | PrefixedRows) -> np.ndarray:
    """Return the position ids 0, 1, 2, ... of a row, int64 [L - 1]."""
    return np.arange(row.length)


def collate(
    packs: Sequence[Sequence[EncodedRow | PrefixedRows]],
    *,
    pad_to_multiple_of: int | None = None,
    pad_to_length: int | None = None,
    pad_token_id: int = 0,
    positions: Positions = consecutive,
) -> PackedBatch:
    """Concatenate the rows of a micro-batch.

    Args:
        packs: packs of the micro-batch; each pack is a list of rows and `PrefixedRows`.
        pad_to_multiple_of: pad S to a multiple of this number, with one document of padding at the end.
        pad_to_length: pad each pack to a batch row of this length (B = number of packs). None: one batch row holds all
            documents (B = 1).
        pad_token_id: token at padding positions.
        positions: function that returns the position ids of a row, int64 [L - 1].

    Raises:
        ValueError: a pack has more positions than `pad_to_length`.
    """
    assert packs and all(packs), "a micro-batch and each of its packs must contain at least one row"
    batch_rows = batch_rows_of(packs, pad_to_length)
    num_positions = pad_to_length or sum(row.length for row in batch_rows[0])
    if pad_to_multiple_of is not None:
        num_positions = -(-num_positions // pad_to_multiple_of) * pad_to_multiple_of
    return _fill(batch_rows, num_positions, pad_token_id, positions)


def batch_rows_of(packs: Sequence[Sequence[RowT]], pad_to_length: int | None) -> list[list[RowT]]:
    """Return the dataset rows of each batch row: one pack if packs are padded to a length, else all packs."""
    if pad_to_length is None:
        return [list(itertools.chain.from_iterable(packs))]
    return [list(pack) for pack in packs]


def _fill(
    batch_rows: Sequence[Sequence[EncodedRow | PrefixedRows]],
    num_positions: int,
    pad_token_id: int,
    positions: Positions,
) -> PackedBatch:
    shape = (len(batch_rows), num_positions)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    all_lengths: list[tuple[int, ...]] = []
    all_parents: list[tuple[int | None, ...]] = []
    padding: list[int] = []
    num_tokens = 0
    for batch_index, rows in enumerate(batch_rows):
        used = sum(row.length for row in rows)
        if used > num_positions:
            named = ", ".join(str(index) for row in rows for index in row.row_indices)
            raise ValueError(
                f"rows {named} have {used} positions, more than the padded length {num_positions}; raise pad_to_length"
            )
        lengths: list[int] = []
        parents: list[int | None] = []
        start = 0
        for row in rows:
            assert row.length >= 1, f"rows {row.row_indices} have no token to predict"
            first, row_positions = len(lengths), positions(row)
            for document in row.documents:
                end = start + len(document.input_ids)
                input_ids[batch_index, start:end] = document.input_ids
                labels[batch_index, start:end] = document.labels
                position_ids[batch_index, start:end] = row_positions[document.first_position :][: end - start]
                lengths.append(end - start)
                parents.append(None if document.parent is None else first + document.parent)
                start = end
        assert start == used, f"the documents have {start} positions, but the row lengths sum to {used}"
        if used < num_positions:
            position_ids[batch_index, used:] = np.arange(num_positions - used)
            lengths.append(num_positions - used)
            parents.append(None)
        all_lengths.append(tuple(lengths))
        all_parents.append(tuple(parents))
        padding.append(num_positions - used)
        num_tokens += used
    row_indices = tuple(index for rows in batch_rows for row in rows for index in row.row_indices)
    continues = any(parent is not None for parents in all_parents for parent in parents)
    return PackedBatch(
        input_ids,
        labels,
        position_ids,
        tuple(all_lengths),
        row_indices,
        num_tokens,
        tuple(all_parents) if continues else None,
        tuple(padding),
    )


class Collate(Protocol):
    """Interface of the function that collates a micro-batch."""

    def __call__(self, micro_batch: Sequence[Sequence[int]], epoch: int | None = None) -> Any:
        """Collate packs of row indices; `epoch` seeds the random position ids of PoSE (None: consecutive ids)."""
        ...


def build_collate(
    rows: TrainingRows,
    data: DataConfig,
    pad_token_id: int,
    vocab_size: int,
    skips: PositionSkips | None = None,
    *,
    collate_packs: Callable[..., Any] = collate,
) -> Collate:
    """Return a function that collates packs of row indices with the configured padding.

    Args:
        rows: the dataset.
        data: `config.data` of a run.
        pad_token_id: token at padding positions.
        vocab_size: vocabulary size of the model. The returned function raises ValueError for a token id outside the
            vocabulary, because a sharded embedding would silently return zeros.
        skips: random position ids of training rows (PoSE); None: consecutive position ids.
        collate_packs: function that collates packs of rows; takes the arguments of `collate`.
    """
    padding = {
        "pad_to_multiple_of": data.pad_to_multiple_of,
        "pad_to_length": data.max_length if data.pad_to_max_length else None,
        "pad_token_id": pad_token_id,
    }
    prefixes = rows.prefixes if data.share_prefix else None

    def collate_rows(micro_batch: Sequence[Sequence[int]], epoch: int | None = None) -> Any:
        packs = [[rows[index] for index in pack] for pack in micro_batch]
        check_tokens(rows, packs, vocab_size)
        if prefixes is not None:
            packs = [prefixes.join(pack) for pack in packs]
        positions = {} if skips is None or epoch is None else {"positions": partial(skips.of_row, epoch)}
        return collate_packs(packs, **padding, **positions)

    return collate_rows


def check_tokens(rows: TrainingRows, packs: Sequence[Sequence[EncodedRow]], vocab_size: int) -> None:
    """Check that all token ids of a micro-batch are in the vocabulary of the model.

    Raises:
        ValueError: a token id is outside the vocabulary; the message names file and line of the row.
    """
    for row in itertools.chain.from_iterable(packs):
        if (largest := int(row.tokens.max())) >= vocab_size:
            file, line = rows.source(row.row_index)
            raise ValueError(
                f"{file}:{line}: row {row.row_index} has the token id {largest}, but the model's vocabulary has "
                f"{vocab_size} tokens; use the tokenizer of the model, or set resize_vocab: true"
            )
