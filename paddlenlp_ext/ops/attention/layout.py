"""Visibility of positions in a pack: computed once per forward pass, used by every layer.

A row with documents of 3 and 2 tokens (x = visible):

                  key
                  a a a b b
    query     a   x . . . .
              a   x x . . .
              a   x x x . .
              b   . . . x .
              b   . . . x x
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle

KeyValuePrefix = tuple[paddle.Tensor, paddle.Tensor]
"""Keys and values [P, K, H] at positions -P to -1 of every document; all documents share one copy."""


@dataclass(frozen=True)
class AttentionLayout:
    """Document lengths of each row of a batch, and the sliding window (None: no window).

    A position sees itself and the earlier positions of its document. With a window it sees only the last `window`
    positions among them, itself included.
    """

    document_lengths: tuple[tuple[int, ...], ...]
    window: int | None = None
    _plans: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_documents(cls, document_lengths: Sequence[Sequence[int]], window: int | None = None) -> AttentionLayout:
        """Build a layout from the document lengths of each row; all rows must have the same sum.

        Raises:
            ValueError: a length or the window is below 1, or the rows' sums differ.
        """
        rows = tuple(tuple(int(length) for length in row) for row in document_lengths)
        if window is not None and window < 1:
            raise ValueError(f"sliding window {window}: it must be at least 1 (a position always sees itself)")
        if not rows or any(length < 1 for row in rows for length in row):
            raise ValueError(f"document lengths {rows}: every row needs documents of at least one token")
        if len({sum(row) for row in rows}) != 1:
            raise ValueError(f"rows of one batch have {[sum(row) for row in rows]} tokens; pad them to one length")
        return cls(rows, window)

    @property
    def row_length(self) -> int:
        """S, the positions per row."""
        return sum(self.document_lengths[0])

    @property
    def num_positions(self) -> int:
        """B * S, the positions in the batch."""
        return len(self.document_lengths) * self.row_length

    def documents(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the starts and lengths of all documents, int64, counting positions through the full batch."""
        lengths = np.array([length for row in self.document_lengths for length in row], np.int64)
        return np.cumsum(lengths) - lengths, lengths

    def is_visible(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return whether queries see keys (broadcast); both are positions in one document, negative for the prefix."""
        near = queries - keys < self.window if self.window is not None else True
        return (keys <= queries) & near

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, computed once per `key`; a backend caches the plan that it derives here."""
        if key not in self._plans:
            self._plans[key] = make()
        return self._plans[key]

    def positions(self) -> np.ndarray:
        """Return the position of each token in its document, int64 [B, S], counting from 0."""
        return np.stack([np.concatenate([np.arange(length) for length in row]) for row in self.document_lengths])

    def dense_mask(self, prefix_length: int = 0) -> np.ndarray:
        """Return a boolean mask [B, S, P + S] of the keys that each query sees; for tests and short inputs."""
        documents_BS = np.stack([np.repeat(np.arange(len(row)), row) for row in self.document_lengths])
        positions_S = np.arange(self.row_length)
        near_SS = self.is_visible(positions_S[:, None], positions_S)
        own_BSS = (documents_BS[:, :, None] == documents_BS[:, None, :]) & near_SS
        prefix_BSP = self.is_visible(self.positions()[:, :, None], np.arange(-prefix_length, 0))
        return np.concatenate([prefix_BSP, own_BSS], axis=-1)
