"""Prompt lengths of documents, derived from their labels, for methods that treat prompt and answer differently."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paddlenlp_ext.utils.labels import IGNORED_LABEL


def compute_prompt_lengths(
    labels: np.ndarray,
    document_lengths: Sequence[Sequence[int]] | None = None,
    document_parents: Sequence[Sequence[int | None]] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Return the prompt length of each document; 0 for a document without target tokens and without continuations.

    The prompt of a document ends with the position that predicts the first token of the last answer.

    Args:
        labels: [B, S], the token that each position should predict, or `IGNORED_LABEL`.
        document_lengths: lengths of the documents of each row; None: each row is one document.
        document_parents: for each document, the index of its parent (the document that it continues), or None.

    Returns:
        One tuple of prompt lengths per row. The prompt length of a document with a parent includes the length of the
        parent. The prompt length of a parent is the maximum over the parent and its continuations.
    """
    document_lengths = document_lengths or [[labels.shape[1]]] * len(labels)
    prompts = [
        [_prompt_length(document) for document in np.split(row, np.cumsum(lengths)[:-1])]
        for row, lengths in zip(labels, document_lengths, strict=True)
    ]
    for row, lengths, parents in zip(prompts, document_lengths, document_parents or (), strict=bool(document_parents)):
        for document, parent in enumerate(parents):
            if parent is not None and row[document]:
                row[document] += lengths[parent]
                row[parent] = max(row[parent], row[document])
    return tuple(map(tuple, prompts))


def _prompt_length(labels: np.ndarray) -> int:
    """Return the prompt length of one document, given its labels."""
    targets = np.flatnonzero(labels != IGNORED_LABEL)
    if len(targets) == 0:
        return 0
    ignored_before = np.flatnonzero(labels[: targets[-1]] == IGNORED_LABEL)
    return int(ignored_before[-1]) + 2 if len(ignored_before) else 1
