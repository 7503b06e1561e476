"""Labels of a batch: the token that each position is to predict, or `IGNORED_LABEL`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

IGNORED_LABEL = -100
"""Label of a position that does not count in the loss."""


def prompt_lengths_of(
    labels: np.ndarray, document_lengths: Sequence[Sequence[int]] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return for each document of each row how many positions hold its prompt, 0 where nothing is learned.

    Args:
        labels: [B, S], what each position predicts, `IGNORED_LABEL` where nothing is learned.
        document_lengths: of each row; None: a row is one document.
    """
    document_lengths = document_lengths or [[labels.shape[1]]] * len(labels)
    return tuple(
        tuple(_prompt_length(part) for part in np.split(row, np.cumsum(lengths)[:-1]))
        for row, lengths in zip(labels, document_lengths, strict=True)
    )


def _prompt_length(labels: np.ndarray) -> int:
    learned = np.flatnonzero(labels != IGNORED_LABEL)
    if len(learned) == 0:
        return 0
    ignored_before = np.flatnonzero(labels[: learned[-1]] == IGNORED_LABEL)
    return int(ignored_before[-1]) + 2 if len(ignored_before) else 1
