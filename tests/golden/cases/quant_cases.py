"""Weights that the golden files of quantization encode, in NumPy only, imported by both libraries."""

from __future__ import annotations

from typing import Any

import numpy as np

CASES: dict[str, dict[str, Any]] = {
    "whole_blocks": {"shape": (48, 64), "block_size": 64},
    "two_groups_of_scales": {"shape": (130, 130), "block_size": 64},
    "short_last_block": {"shape": (7, 33), "block_size": 64},
    "less_than_a_block": {"shape": (1, 7), "block_size": 64},
    "large_blocks": {"shape": (20, 90), "block_size": 256},
}


def weight_of(case: str) -> np.ndarray:
    """Return a float32 weight [out, in]: rows of very different scale, a row of zeros, blocks with one large value."""
    rows, columns = CASES[case]["shape"]
    generator = np.random.default_rng([7, rows, columns])
    weight = generator.standard_normal((rows, columns)) * 10.0 ** generator.uniform(-3, 1, (rows, 1))
    weight[1:2] = 0.0
    weight[2:3, ::17] *= 30.0
    return weight.astype(np.float32)


LOFTQ_RANK = 4
LOFTQ_STEPS = (1, 3)


def loftq_weight() -> np.ndarray:
    """Return the weight of the LoftQ tests, float32 [24, 64]."""
    return np.random.default_rng(11).standard_normal((24, 64)).astype(np.float32)
