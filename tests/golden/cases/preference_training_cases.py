"""Pairs of answers for the tiny model `MODEL`, with log-probabilities of a reference model."""

from __future__ import annotations

import numpy as np

from tests.golden.cases.model_cases import VOCAB

MODEL = "llama_odd_sizes"
"""Case of model_cases.py whose configuration and weights the model has."""
LOSSES = {"sigmoid": {"beta": 0.3}, "ipo": {"beta": 0.2}, "apo_zero": {"beta": 0.5}}
SIZES = ((9, 5, 3), (4, 1, 7), (1, 6, 6))
"""Tokens of the prompt, the chosen and the rejected answer of each pair."""


def make_pairs() -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return prompt, chosen and rejected answer of each pair, as token ids."""
    generator = np.random.default_rng(31)
    return [tuple(generator.integers(0, VOCAB, size) for size in sizes) for sizes in SIZES]


def make_reference() -> np.ndarray:
    """Return log-probabilities of the chosen and rejected answers under a reference model, float32 [pairs, 2]."""
    lengths = np.array([sizes[1:] for sizes in SIZES])
    return (-lengths * np.random.default_rng(32).uniform(3.5, 6, lengths.shape)).astype(np.float32)
