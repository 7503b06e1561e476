"""Dataset rows to batches, the way `config.data` asks for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from paddlenlp_ext.data.batch import PackedBatch, collate

Collate = Callable[[Sequence[Sequence[int]]], PackedBatch]
"""From a micro-batch (packs of row indices) to its batch."""


def build_collate(rows: Any, data: Any, pad_token_id: int, vocab_size: int) -> Collate:
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


def _outside(rows: Any, index: int, token: int, vocab_size: int) -> str:
    file, line = rows.source(index)
    return (
        f"row {index} ({file}:{line}) has the token id {token}, and the model's vocabulary has {vocab_size}: this "
        "tokenizer is not the model's, or has tokens that the model was not extended by"
    )
