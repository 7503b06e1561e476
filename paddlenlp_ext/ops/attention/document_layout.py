"""Document layout of a packed batch, which defines the attention mask.

A row with documents of 3 and 2 tokens (x = visible):

                  key
                  a a a b b
    query     a   x . . . .
              a   x x . . .
              a   x x x . .
              b   . . . x .
              b   . . . x x

A document may be a branch that continues an earlier document, its parent. A branch attends to all positions of the
parent, and its position ids continue the position ids of the parent. Two branches b and c of a parent p do not attend
to each other:

                  key
                  p p b b c       position
    query     p   x . . . .       0
              p   x x . . .       1
              b   x x x . .       2
              b   x x x x .       3
              c   x x . . x       2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle

KeyValuePrefix = tuple[paddle.Tensor, paddle.Tensor]
"""Keys and values [P, K, H] at positions -P to -1 of every document, shared by all documents."""
DocumentParents = Sequence[Sequence[int | None]]
"""Index of each document's parent within the row, for each row; None for documents without a parent."""


@dataclass(frozen=True)
class AttentionLayout:
    """Document lengths of each row of a batch, the sliding window (None: no window), and the documents' parents.

    A position attends to itself and to the earlier positions of its document and of the parent document. A window
    limits attention to the last `window` positions, including the position itself.
    """

    document_lengths: tuple[tuple[int, ...], ...]
    window: int | None = None
    document_parents: tuple[tuple[int | None, ...], ...] | None = None
    _plans: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_documents(
        cls,
        document_lengths: Sequence[Sequence[int]],
        window: int | None = None,
        document_parents: DocumentParents | None = None,
    ) -> AttentionLayout:
        """Build a layout from the document lengths of each row; all rows must have the same number of tokens.

        Args:
            document_lengths: lengths of the documents of each row.
            window: maximum number of positions that a query attends to, including its own; None: no limit.
            document_parents: for each row, the index of each document's parent in the row, or None for a document
                without a parent; None if no document has a parent. The parent must be the last preceding document
                without a parent.

        Raises:
            ValueError: a length or the window is below 1, the rows do not have the same number of tokens, or a document
                cannot continue the given parent.
        """
        rows = tuple(tuple(int(length) for length in row) for row in document_lengths)
        if window is not None and window < 1:
            raise ValueError(f"sliding window {window} must be at least 1, because a position attends to itself")
        if not rows or any(length < 1 for row in rows for length in row):
            raise ValueError(f"document lengths {rows}: every row needs documents of at least one token")
        if len({sum(row) for row in rows}) != 1:
            raise ValueError(
                f"the rows of a batch have {[sum(row) for row in rows]} tokens; pad the rows to the same length"
            )
        if document_parents is None or all(parent is None for row in document_parents for parent in row):
            return cls(rows, window)
        parents = tuple(map(tuple, document_parents))
        _check_parents(rows, parents)
        return cls(rows, window, parents)

    @property
    def row_length(self) -> int:
        """S, the number of positions per row."""
        return sum(self.document_lengths[0])

    @property
    def num_positions(self) -> int:
        """B * S, the number of positions in the batch."""
        return len(self.document_lengths) * self.row_length

    def documents(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the starts and lengths of all documents, int64; starts are indices into the flattened batch."""
        lengths = np.array([length for row in self.document_lengths for length in row], np.int64)
        return np.cumsum(lengths) - lengths, lengths

    def last_positions(self) -> np.ndarray:
        """Return the index of the last position of each row in the flattened batch, int64."""
        return np.arange(1, len(self.document_lengths) + 1) * self.row_length - 1

    def rows(self) -> np.ndarray:
        """Return the index of each document's row, int64."""
        return np.repeat(np.arange(len(self.document_lengths)), [len(row) for row in self.document_lengths])

    def last_documents(self) -> np.ndarray:
        """Return the index of the last document of each row among all documents, int64."""
        return np.cumsum([len(row) for row in self.document_lengths]) - 1

    def parents(self) -> np.ndarray:
        """Return the index of each document's parent among all documents, int64; -1 for documents without a parent."""
        if self.document_parents is None:
            return np.full(sum(map(len, self.document_lengths)), -1)
        counts = [len(row) for row in self.document_parents]
        firsts = np.cumsum([0, *counts[:-1]]).tolist()
        return np.array(
            [
                -1 if parent is None else first + parent
                for first, row in zip(firsts, self.document_parents, strict=True)
                for parent in row
            ],
            np.int64,
        )

    def first_positions(self) -> np.ndarray:
        """Return the position of each document's first token, int64: 0, or the length of the parent."""
        _, lengths = self.documents()
        parents = self.parents()
        return np.where(parents < 0, 0, lengths[parents])

    def sequence_lengths(self) -> np.ndarray:
        """Return the length of each document, int64, including the parent or the longest branch."""
        _, lengths = self.documents()
        parents, ends = self.parents(), self.first_positions() + lengths
        longest = ends.copy()
        np.maximum.at(longest, parents[parents >= 0], ends[parents >= 0])
        return longest

    def is_visible(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return whether queries attend to keys; the two arrays of positions are broadcast.

        Positions count from the start of the document, or of its parent. Positions of a prefix are negative.
        """
        near = queries - keys < self.window if self.window is not None else True
        return (keys <= queries) & near

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._plans:
            self._plans[key] = make()
        return self._plans[key]

    def positions(self) -> np.ndarray:
        """Return the position ids, int64 [B, S]: each document starts at 0 or continues the positions of its parent."""
        starts, lengths = self.documents()
        offsets = np.repeat(self.first_positions() - starts, lengths)
        return (np.arange(self.num_positions) + offsets).reshape(len(self.document_lengths), self.row_length)

    def distances(self, prefix_length: int = 0) -> np.ndarray:
        """Return the distance from each query back to each key, fp32 [B, S, P + S]; for tests.

        Entries for masked keys are undefined.
        """
        own_BS = self.positions()
        prefix_BP = np.broadcast_to(np.arange(-prefix_length, 0), (len(own_BS), prefix_length))
        keys_BT = np.concatenate([prefix_BP, own_BS], axis=1)
        return (own_BS[:, :, None] - keys_BT[:, None, :]).astype(np.float32)

    def dense_mask(self, prefix_length: int = 0) -> np.ndarray:
        """Return the boolean mask [B, S, P + S] of the keys that each query attends to; for tests and short inputs."""
        _, lengths = self.documents()
        shape = (len(self.document_lengths), self.row_length)
        documents_BS = np.repeat(np.arange(len(lengths)), lengths).reshape(shape)
        parents_BS = np.repeat(self.parents(), lengths).reshape(shape)
        positions_BS = self.positions()
        is_own_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
        is_parent_BSS = parents_BS[:, :, None] == documents_BS[:, None, :]
        is_near_BSS = self.is_visible(positions_BS[:, :, None], positions_BS[:, None, :])
        own_BSS = (is_own_BSS | is_parent_BSS) & is_near_BSS
        prefix_BSP = self.is_visible(positions_BS[:, :, None], np.arange(-prefix_length, 0))
        return np.concatenate([prefix_BSP, own_BSS], axis=-1)


def _check_parents(
    document_lengths: tuple[tuple[int, ...], ...], document_parents: tuple[tuple[int | None, ...], ...]
) -> None:
    """Check that each branch continues the last preceding document without a parent.

    Raises:
        ValueError: a branch continues another document, or the number of entries of a row is not the number of
            documents.
    """
    if [len(row) for row in document_lengths] != [len(row) for row in document_parents]:
        raise ValueError(
            f"document_parents has {[len(row) for row in document_parents]} entries per row, but the rows have "
            f"{[len(row) for row in document_lengths]} documents; pass a parent, or None, for each document"
        )
    for number, row in enumerate(document_parents):
        root = None
        for index, parent in enumerate(row):
            if parent is None:
                root = index
            elif parent != root:
                raise ValueError(
                    f"document_parents: document {index} of row {number} continues document {parent}, but must "
                    f"continue the last preceding document without a parent ({root})"
                )
