"""Codebooks: the value (level) of each code of a quantization format.

    nf4            quantiles of the normal distribution (Dettmers et al. 2023, QLoRA, arXiv:2305.14314, section 3)
    nf4_symmetric  7 normal quantiles on each side of zero, and two codes for zero
    fp4            one sign bit, two exponent bits, one mantissa bit
    int4           -8 ... 7, where -8 is unused
    dynamic        8 bits for scales and optimizer moments: sign, decimal exponent in unary, and fraction in all other
                   bits (Dettmers 2016, arXiv:1511.04561)

The tables nf4, fp4 and dynamic are bitwise equal to the tables in bitsandbytes.
"""

from __future__ import annotations

import functools
from statistics import NormalDist

import numpy as np

_OUTERMOST = 0.9677083
"""Probability of the outermost quantile as published, the mean of 1 - 1/32 and 1 - 1/30."""


@functools.cache
def levels(algo: str) -> np.ndarray:
    """Return the value of each code of a 4-bit format, float32 [16]."""
    tables = {"nf4": _nf4, "nf4_symmetric": _nf4_symmetric, "fp4": _fp4, "weight_only_int4": _int4}
    return tables[algo]()


@functools.cache
def dynamic_levels(signed: bool = True) -> np.ndarray:
    """Return the value of each 8-bit code of a scale or optimizer moment, float32 [256], ascending.

    The positive values are 1 and interval midpoints in the seven decades from 10^-7 to 1. From the lowest to the
    highest, the decades have 1, 2, 4 ... 64 equal intervals. With unsigned codes, each decade has twice as many
    intervals.
    """
    middles = []
    for decade in range(7):
        edges = linspace(0.1, 1.0, 2 ** (decade + (0 if signed else 1)) + 1)
        middles.append(np.float32(10.0 ** (decade - 6)) * ((edges[:-1] + edges[1:]) / np.float32(2)))
    positive = np.concatenate(middles)
    negative = -positive if signed else positive[:0]
    return np.sort(np.concatenate([positive, negative, np.array([0.0, 1.0], np.float32)]))


@functools.cache
def boundaries(algo: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the midpoints between adjacent levels, float32 [15], and the codes in order of their levels, uint8 [16].

    The code of a value v is `codes[number of midpoints below v]`. With two codes for zero, small positive values get
    the second zero code.
    """
    order = np.argsort(levels(algo), kind="stable")
    rising = levels(algo)[order]
    return (rising[:-1] + rising[1:]) / np.float32(2), order.astype(np.uint8)


def linspace(first: float, last: float, count: int) -> np.ndarray:
    """Return `count` equidistant float32 values, bitwise equal to torch.linspace, which the published tables use.

    The first half of the values is computed from `first`, the second half from `last`.
    """
    low, high = np.float32(first), np.float32(last)
    step, index = np.float64((high - low) / np.float32(count - 1)), np.arange(count)
    return np.where(index < count // 2, low + step * index, high - step * index[::-1]).astype(np.float32)


def _nf4() -> np.ndarray:
    """Return 7 negative quantiles, zero and 8 positive quantiles of equal probability, divided by the largest."""
    return _scaled([*(-q for q in _quantiles(7)), 0.0, *_quantiles(8)])


def _nf4_symmetric() -> np.ndarray:
    """Return 7 negative quantiles, two zeros and 7 positive quantiles of equal probability, divided by the largest."""
    return _scaled([*(-q for q in _quantiles(7)), 0.0, 0.0, *_quantiles(7)])


def _quantiles(count: int) -> list[float]:
    """Return `count` positive quantiles of the normal distribution, for equidistant probabilities above 1/2."""
    return [NormalDist().inv_cdf(float(p)) for p in linspace(_OUTERMOST, 0.5, count + 1)[:-1]]


def _scaled(values: list[float]) -> np.ndarray:
    table = np.array(sorted(values), np.float32)
    return table / table.max()


def _fp4() -> np.ndarray:
    """Return the value of each code (sign, exponent e, mantissa m), scaled by 1 / 12.

    Unscaled values for m = 0, 1: 0, 1/16 (e = 0); 8, 12 (e = 1); 4, 6 (e = 2); 2, 3 (e = 3).
    """
    positive = np.array([0, 1 / 16, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
    return np.concatenate([positive, -positive])


def _int4() -> np.ndarray:
    return np.arange(-8, 8, dtype=np.float32)
