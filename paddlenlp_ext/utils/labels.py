"""Labels of a batch: the token that each position should predict, or `IGNORED_LABEL`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

IGNORED_LABEL = -100
"""Label of a position that the loss ignores."""


def prompt_lengths_of(
    labels: np.ndarray,
    document_lengths: Sequence[Sequence[int]] | None = None,
    document_parents: Sequence[Sequence[int | None]] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Return the prompt length of each document, 0 for a document without target tokens.

    Args:
        labels: [B, S], the token that each position should predict, or `IGNORED_LABEL`.
        document_lengths: lengths of the documents of each row; None: each row is one document.
        document_parents: index of the document that each document continues, or None.

    Returns:
        For each row, one prompt length per document: the number of positions up to and including the position that
        predicts the first token of the last answer. If a document continues another one, the positions count from the
        start of that parent, and the parent gets the longest prompt length among its continuations.
    """
    document_lengths = document_lengths or [[labels.shape[1]]] * len(labels)
    prompts = [
        [_prompt_length(part) for part in np.split(row, np.cumsum(lengths)[:-1])]
        for row, lengths in zip(labels, document_lengths, strict=True)
    ]
    for row, lengths, parents in zip(prompts, document_lengths, document_parents or (), strict=bool(document_parents)):
        for document, parent in enumerate(parents):
            if parent is not None and row[document]:
                row[document] += lengths[parent]
                row[parent] = max(row[parent], row[document])
    return tuple(map(tuple, prompts))


def _prompt_length(labels: np.ndarray) -> int:
    targets = np.flatnonzero(labels != IGNORED_LABEL)
    if len(targets) == 0:
        return 0
    ignored_before = np.flatnonzero(labels[: targets[-1]] == IGNORED_LABEL)
    return int(ignored_before[-1]) + 2 if len(ignored_before) else 1
