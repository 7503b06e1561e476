"""Chunks of the documents of a packed batch, in the order in which a recurrence visits them.

The chunks of a document form a chain that starts after the last chunk of the parent. Chunks with the same number of
chunks before them form a level. All chunks of a level are computed at once, and the levels one after another:

    document   parent   chunks in levels 0, 1, 2 and 3
    0          -        0   2   4
    1          0                    6
    2          -        1   3
    3          2                5
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import numpy as np

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.tensor_utils import Indices

CHUNK = 64
"""Number of positions of a chunk."""


@dataclass(frozen=True)
class Level:
    """Chunks with the same number of chunks before them.

    Attributes:
        chunks: range of the chunks of the level among all chunks.
        previous: index, within the preceding level, of the chunk that each chunk continues; in level 0, the index of
            the document.
        ending: indices, within the level, of the last chunks of documents.
        ended: index of the document of each of these last chunks.
    """

    chunks: slice
    previous: Indices
    ending: Indices
    ended: Indices


@dataclass(frozen=True)
class DocumentChunks:
    """All chunks of a batch, sorted by level; no chunk contains positions of two documents.

    Attributes:
        positions: index of the position in each slot of each chunk, [M, C]; T for an empty slot.
        slots: index of each position's slot among all M * C slots, [T].
        levels: levels in order.
        order: index of each document among the last chunks of documents, in the order of the levels.
    """

    positions: Indices
    slots: Indices
    levels: list[Level]
    order: Indices


@singledispatch
def document_chunks(layout: Any, size: int = CHUNK) -> DocumentChunks:
    """Return the chunks of a layout; the layout caches them for all layers.

    A batch of documents of one position, as in decoding, has chunks of one position.

    Args:
        layout: `AttentionLayout` of the batch; in a static graph, a `GraphDocuments`.
        size: number of positions of a chunk.
    """
    return layout.cached(("document chunks", size), lambda: _document_chunks(layout, size))


def _document_chunks(layout: AttentionLayout, size: int) -> DocumentChunks:
    starts, lengths = layout.documents()
    parents = layout.parents()
    size = size if lengths.max() > 1 else 1
    counts = -(-lengths // size)
    firsts = np.where(parents < 0, 0, counts[parents])  # level of the first chunk; a parent has no parent itself
    document_M = np.repeat(np.arange(len(lengths)), counts)
    number_M = np.arange(len(document_M)) - np.repeat(np.cumsum(counts) - counts, counts)
    level_M = firsts[document_M] + number_M
    order = np.argsort(level_M, kind="stable")
    document_M, number_M, level_M = document_M[order], number_M[order], level_M[order]

    local_MC = number_M[:, None] * size + np.arange(size)
    is_filled_MC = local_MC < lengths[document_M][:, None]
    positions_MC = np.where(is_filled_MC, starts[document_M][:, None] + local_MC, layout.num_positions)
    slots_T = np.argsort(positions_MC, axis=None, kind="stable")[: layout.num_positions]
    bounds = np.searchsorted(level_M, np.arange(level_M[-1] + 2))
    levels: list[Level] = []
    index_of_document = np.arange(len(lengths))  # index of a document's latest chunk within its level
    for begin, end in itertools.pairwise(bounds.tolist()):
        documents, numbers = document_M[begin:end], number_M[begin:end]
        continued = np.where((numbers == 0) & (parents[documents] >= 0), parents[documents], documents)
        previous = index_of_document[continued]
        index_of_document[documents] = np.arange(end - begin)
        ending = np.flatnonzero(numbers == counts[documents] - 1)
        levels.append(Level(slice(begin, end), previous, ending, documents[ending]))
    order = np.argsort(np.concatenate([level.ended for level in levels]))
    return DocumentChunks(positions_MC, slots_T, levels, order)
