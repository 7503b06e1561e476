"""Which positions of a pack may look at which: computed once a forward pass, used by every layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle

KeyValuePrefix = tuple[paddle.Tensor, paddle.Tensor]
"""Keys and values [P, K, H] that stand before every document: its positions -P to -1, one copy for all of them."""


@dataclass(frozen=True)
class AttentionLayout:
    """The documents in each row of a batch and the sliding window, None for none.

    A position looks at itself and the positions before it in its own document; with a window, only at the last
    `window` of these, itself included.
    """

    document_lengths: tuple[tuple[int, ...], ...]
    window: int | None = None
    _plans: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_documents(cls, document_lengths: Sequence[Sequence[int]], window: int | None = None) -> AttentionLayout:
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

    @property
    def num_positions(self) -> int:
        """B * S."""
        return len(self.document_lengths) * self.row_length

    def documents(self) -> tuple[np.ndarray, np.ndarray]:
        """Starts and lengths, int64, of all documents, positions counted through the whole batch."""
        lengths = np.array([length for row in self.document_lengths for length in row], np.int64)
        return np.cumsum(lengths) - lengths, lengths

    def may_look(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Whether queries may look at keys (broadcast), both as positions inside one document.

        Those of a prefix are negative.
        """
        near = queries - keys < self.window if self.window is not None else True
        return (keys <= queries) & near

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returned for `key` the first time: the plan that an implementation draws from this layout."""
        if key not in self._plans:
            self._plans[key] = make()
        return self._plans[key]

    def positions(self) -> np.ndarray:
        """int64 [B, S], counting from 0 in each document."""
        return np.stack([np.concatenate([np.arange(length) for length in row]) for row in self.document_lengths])

    def dense_mask(self, prefix_length: int = 0) -> np.ndarray:
        """Boolean [B, S, P + S], True where a query (middle axis) may look at a key. For tests and short inputs."""
        documents_BS = np.stack([np.repeat(np.arange(len(row)), row) for row in self.document_lengths])
        positions_S = np.arange(self.row_length)
        near_SS = self.may_look(positions_S[:, None], positions_S)
        own_BSS = (documents_BS[:, :, None] == documents_BS[:, None, :]) & near_SS
        prefix_BSP = self.may_look(self.positions()[:, :, None], np.arange(-prefix_length, 0))
        return np.concatenate([prefix_BSP, own_BSS], axis=-1)
