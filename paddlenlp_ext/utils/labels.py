"""Labels of a batch: the token that each position should predict, or `IGNORED_LABEL`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

IGNORED_LABEL = -100
"""Label of a position that does not count in the loss."""


def prompt_lengths_of(
    labels: np.ndarray, document_lengths: Sequence[Sequence[int]] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return the number of positions of each document's prompt, 0 for a document without target tokens.

    Args:
        labels: [B, S], the token that each position should predict, or `IGNORED_LABEL`.
        document_lengths: lengths of the documents of each row; None: each row is one document.

    Returns:
        For each row, one number per document: the positions up to the one that predicts the first token of its last
        answer, inclusive.
    """
    document_lengths = document_lengths or [[labels.shape[1]]] * len(labels)
    return tuple(
        tuple(_prompt_length(part) for part in np.split(row, np.cumsum(lengths)[:-1]))
        for row, lengths in zip(labels, document_lengths, strict=True)
    )


def _prompt_length(labels: np.ndarray) -> int:
    targets = np.flatnonzero(labels != IGNORED_LABEL)
    if len(targets) == 0:
        return 0
    ignored_before = np.flatnonzero(labels[: targets[-1]] == IGNORED_LABEL)
    return int(ignored_before[-1]) + 2 if len(ignored_before) else 1
