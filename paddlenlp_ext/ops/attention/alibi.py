"""Attention with linear biases (ALiBi, Press et al. 2022, arXiv:2108.12409).

The score of a key is lowered by the slope of the head times the distance between query and key, both counted in the
document. There is no other position information.

Shapes: N query heads.
"""

from __future__ import annotations

import math

import numpy as np


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Return the slope of each query head, fp32 [N].

    With n heads, n a power of two, slope i is 2^(-8 i / n). Other numbers of heads take the slopes of the largest power
    of two below, followed by every second slope of twice that power.
    """
    power = 1 << math.floor(math.log2(num_heads))
    slopes = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-8.0 * np.arange(1, 2 * power + 1, 2) / (2 * power))
    return np.concatenate([slopes, between[: num_heads - power]]).astype(np.float32)
