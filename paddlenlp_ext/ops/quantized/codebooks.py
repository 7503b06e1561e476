"""The numbers that codes stand for.

    nf4      quantiles of the normal distribution (Dettmers et al. 2023, QLoRA, arXiv 2305.14314, section 3)
    fp4      a sign, two bits of exponent and one of mantissa
    int4     -8 ... 7, of which -8 stays unused
    dynamic  8 bits for scales and moments: a sign, a decimal exponent in unary, the rest fraction
             (Dettmers 2016, arXiv 1511.04561)

All tables are the same numbers as in bitsandbytes, to the bit.
"""

from __future__ import annotations

import functools
from statistics import NormalDist

import numpy as np

_OUTERMOST = 0.9677083
"""The probability of the last quantile: midway between 1 - 1/32 and 1 - 1/30, as published."""


@functools.cache
def levels(algo: str) -> np.ndarray:
    """float32 [16]: what each code of a 4-bit format stands for."""
    return {"nf4": _nf4, "fp4": _fp4, "weight_only_int4": _int4}[algo]()


@functools.cache
def dynamic_levels(signed: bool = True) -> np.ndarray:
    """float32 [256], rising: what each 8-bit code of a scale or of an optimizer's moment stands for.

    The positive half: 1, and for each of seven decades, 10^-7 to 10^-6 first, the middles of 1, 2, 4 ... 64 equal
    parts of 0.1 ... 1. The larger a number, the finer its part. Numbers that are never negative need no sign: there are
    twice as many parts then.
    """
    middles = []
    for decade in range(7):
        edges = spread(0.1, 1.0, 2 ** (decade + (0 if signed else 1)) + 1)
        middles.append(np.float32(10.0 ** (decade - 6)) * ((edges[:-1] + edges[1:]) / np.float32(2)))
    positive = np.concatenate(middles)
    negative = -positive if signed else positive[:0]
    return np.sort(np.concatenate([positive, negative, np.array([0.0, 1.0], np.float32)]))


@functools.cache
def boundaries(algo: str) -> tuple[np.ndarray, np.ndarray]:
    """(float32 [15], uint8 [16]): the middles between neighbouring levels, and the codes in the order of levels.

    The code of v is `order[number of middles below v]`. Of fp4's two zeros the second is for numbers above 0.
    """
    order = np.argsort(levels(algo), kind="stable")
    rising = levels(algo)[order]
    return (rising[:-1] + rising[1:]) / np.float32(2), order.astype(np.uint8)


def spread(first: float, last: float, count: int) -> np.ndarray:
    """float32: `count` numbers at equal distances, counted from both ends by a step in float32, rounded once each.

    It is what torch.linspace gives, from which the published tables were made.
    """
    low, high = np.float32(first), np.float32(last)
    step, index = np.float64((high - low) / np.float32(count - 1)), np.arange(count)
    return np.where(index < count // 2, low + step * index, high - step * index[::-1]).astype(np.float32)


def _nf4() -> np.ndarray:
    """Eight positive quantiles, seven negative ones, and zero, in steps of equal probability; over the largest."""
    quantile = NormalDist().inv_cdf
    positive = [quantile(float(p)) for p in spread(_OUTERMOST, 0.5, 9)[:-1]]
    negative = [-quantile(float(p)) for p in spread(_OUTERMOST, 0.5, 8)[:-1]]
    table = np.array(sorted([*negative, 0.0, *positive]), np.float32)
    return table / table.max()


def _fp4() -> np.ndarray:
    """Code = sign, exponent e, mantissa m. e = 0: 0 or 1/16; 1: 8, 12; 2: 4, 6; 3: 2, 3; all over 12."""
    positive = np.array([0, 1 / 16, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
    return np.concatenate([positive, -positive])


def _int4() -> np.ndarray:
    return np.arange(-8, 8, dtype=np.float32)
