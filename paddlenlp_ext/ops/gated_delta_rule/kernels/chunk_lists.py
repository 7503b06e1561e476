"""Chunks of the documents of a batch, for the kernels of recurrences; independent of Paddle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ChunkLists:
    """Chunks and documents of a batch, as NumPy arrays or as tensors.

    Attributes:
        chunks: int32 [M, 2]: first position and end (exclusive) of each chunk, document by document.
        documents: int32 [R, 4]: first chunk, end of the chunks, parent or -1, and end of the documents that continue
            the document; these documents follow the document.
        roots: int32, the documents without a parent.
        branches: int32, the documents with a parent.
        size: number of positions of a chunk that is not the last of its document.
    """

    chunks: Any
    documents: Any
    roots: Any
    branches: Any
    size: int

    def converted(self, convert: Callable[[Any], Any]) -> ChunkLists:
        """Return the lists with each array converted, such as to a tensor."""
        chunks, documents, roots, branches = map(convert, (self.chunks, self.documents, self.roots, self.branches))
        return ChunkLists(chunks, documents, roots, branches, self.size)


def chunk_lists(starts: np.ndarray, lengths: np.ndarray, parents: np.ndarray, size: int) -> ChunkLists:
    """Return the chunks of documents, with `size` positions or fewer at the end of a document.

    Args:
        starts, lengths: first position and number of positions of each document.
        parents: index of the document that each document continues, which is the last preceding document without a
            parent; -1 for none.
        size: number of positions of a chunk.
    """
    counts = -(-lengths // size)
    ends = np.cumsum(counts)
    document = np.repeat(np.arange(len(lengths)), counts)
    first = starts[document] + (np.arange(len(document)) - (ends - counts)[document]) * size
    chunks = np.stack([first, np.minimum(first + size, (starts + lengths)[document])], axis=1)
    roots = np.flatnonzero(parents < 0)
    end_of_branches = np.append(roots, len(parents))[np.searchsorted(roots, np.arange(len(parents)), side="right")]
    documents = np.stack([ends - counts, ends, parents, end_of_branches], axis=1)
    lists = ChunkLists(chunks, documents, roots, np.flatnonzero(parents >= 0), size)
    return lists.converted(lambda x: x.astype(np.int32))
