"""Attention with linear biases (ALiBi, Press et al. 2022, arXiv:2108.12409).

ALiBi subtracts the slope of the head times the distance between query and key from each score. ALiBi models have no
other position information.

Shapes: N query heads.
"""

from __future__ import annotations

import math

import numpy as np


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Return the slope of each query head, fp32 [N].

    If n is a power of two, slope i = 1 .. n of n heads is 2^(-8 i / n). For any other n, the result is the slopes of p
    heads, followed by the slopes i = 1, 3, 5, ... of 2 p heads, where p is the largest power of two below n.
    """
    power = 1 << math.floor(math.log2(num_heads))
    slopes = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-8.0 * np.arange(1, 2 * power + 1, 2) / (2 * power))
    return np.concatenate([slopes, between[: num_heads - power]]).astype(np.float32)
