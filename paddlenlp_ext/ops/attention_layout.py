"""Which positions of a pack may look at which: computed once a forward pass, used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class AttentionLayout:
    """The documents in each row of a batch and the sliding window, None for none.

    A position looks at itself and the positions before it in its own document; with a window, only at the last
    `window` of these, itself included.
    """

    document_lengths: tuple[tuple[int, ...], ...]
    window: int | None = None

    @classmethod
    def from_documents(
        cls, document_lengths: Sequence[Sequence[int]], window: int | None = None
    ) -> AttentionLayout:
        """Build the layout of rows that each list their documents' lengths; all rows have one sum.

        Raises:
            ValueError: a length or the window is below 1, or the rows' sums differ.
        """
        rows = tuple(tuple(int(length) for length in row) for row in document_lengths)
        if window is not None and window < 1:
            raise ValueError(f"sliding window {window}: it must be at least 1 (a position always sees itself).")
        if not rows or any(length < 1 for row in rows for length in row):
            raise ValueError(f"document lengths {rows}: every row needs documents of at least one token.")
        if len({sum(row) for row in rows}) != 1:
            raise ValueError(f"rows of one batch hold {[sum(row) for row in rows]} tokens; pad them to one length.")
        return cls(rows, window)

    @property
    def row_length(self) -> int:
        """S, the positions in a row."""
        return sum(self.document_lengths[0])

    def positions(self) -> np.ndarray:
        """int64 [B, S], counting from 0 in each document."""
        return np.stack([np.concatenate([np.arange(length) for length in row]) for row in self.document_lengths])

    def dense_mask(self) -> np.ndarray:
        """Boolean [B, S, S], True where a query (middle axis) may look at a key. For tests and short inputs."""
        documents_BS = np.stack([np.repeat(np.arange(len(row)), row) for row in self.document_lengths])
        distance_SS = np.arange(self.row_length)[:, None] - np.arange(self.row_length)[None, :]
        near_SS = (distance_SS >= 0) & (distance_SS < (self.window or self.row_length))
        return (documents_BS[:, :, None] == documents_BS[:, None, :]) & near_SS
