"""Dataset rows to batches, the way `config.data` asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paddlenlp_ext.data.batch import PackedBatch, collate

Collate = Callable[[Sequence[Sequence[int]]], PackedBatch]
"""From a micro-batch (packs of row indices) to its batch."""


def build_collate(rows: Any, data: Any, pad_token_id: int) -> Collate:
    """Collation of `rows` (a TokenizedDataset) under the padding options of `config.data`."""
    pad_to_length = data.max_length if data.pad_to_max_length else None

    def collate_rows(micro_batch: Sequence[Sequence[int]]) -> PackedBatch:
        return collate(
            [[rows[index] for index in pack] for pack in micro_batch],
            pad_to_multiple_of=data.pad_to_multiple_of,
            pad_to_length=pad_to_length,
            pad_token_id=pad_token_id,
        )

    return collate_rows
