"""Attention with linear biases (ALiBi, Press et al. 2022, arXiv:2108.12409).

The slope of the head times the distance between query and key within their document is subtracted from each score. The
model has no other position information.

Shapes: N query heads.
"""

from __future__ import annotations

import math

import numpy as np


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Return the slope of each query head, fp32 [N].

    If n is a power of two, slope i of n heads is 2^(-8 i / n). Otherwise, the result is the slopes for p heads, where p
    is the largest power of two below n, followed by every second slope for 2 p heads.
    """
    power = 1 << math.floor(math.log2(num_heads))
    slopes = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-8.0 * np.arange(1, 2 * power + 1, 2) / (2 * power))
    return np.concatenate([slopes, between[: num_heads - power]]).astype(np.float32)
