"""Confidence intervals and paired comparisons of scores.

| score | interval | comparison of two models on the same rows |
|---|---|---|
| share of rows | Wilson (J. Am. Stat. Assoc. 22, 1927) | exact McNemar test (Psychometrika 12, 1947) |
| mean, or ratio of sums | bootstrap percentiles (Efron, Ann. Stat. 7, 1979) | paired bootstrap |

The resampled rows depend only on the seed and the number of rows. Scores of two models on the same rows are therefore
resampled identically.

Shapes: N rows, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
CONFIDENCE = 0.95
"""Coverage probability of all confidence intervals."""
NUM_RESAMPLES = 2000
_ROWS_PER_CHUNK = 1 << 20  # limit on the row indices in memory


@dataclass(frozen=True)
class Interval:
    """Bounds of a confidence interval."""

    low: float
    high: float


def wilson_interval(num_successes: float, num_rows: int) -> Interval:
    """Return Wilson's score interval of a share p of n rows, where z is the normal quantile of `CONFIDENCE`.

        (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Raises:
        ValueError: there are no rows.
    """
    if num_rows < 1:
        raise ValueError("a share needs at least one row")
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    share, scale = num_successes / num_rows, z * z / num_rows
    center = share + scale / 2
    margin = math.sqrt(z * z * share * (1 - share) / num_rows + scale * scale / 4)
    return Interval(max(0.0, (center - margin) / (1 + scale)), min(1.0, (center + margin) / (1 + scale)))


def resampled_ratios(values: Array, weights: Array, seed: int, num_resamples: int = NUM_RESAMPLES) -> Array:
    """Return sum(values) / sum(weights) of each resample, float64 [R].

    Args:
        values: float64 [N].
        weights: float64 [N].
        seed: random seed that selects the resampled rows.
        num_resamples: number of resamples, R.
    """
    generator, num_rows = np.random.default_rng(seed), len(values)
    per_chunk = max(1, _ROWS_PER_CHUNK // num_rows)
    ratios = []
    for first in range(0, num_resamples, per_chunk):
        rows = generator.integers(0, num_rows, (min(per_chunk, num_resamples - first), num_rows))
        ratios.append(values[rows].sum(axis=1) / weights[rows].sum(axis=1))
    return np.concatenate(ratios)


def bootstrap_interval(
    values: Array, weights: Array, seed: int, transform: Callable[[Array], Array] = np.asarray
) -> Interval:
    """Return the bootstrap percentile interval of transform(sum(values) / sum(weights)).

    Args:
        values, weights, seed: see `resampled_ratios`.
        transform: function to apply to each ratio.
    """
    return _percentiles(transform(resampled_ratios(values, weights, seed)))


@dataclass(frozen=True)
class Comparison:
    """Difference between two models on the same rows.

    Attributes:
        difference: score of the second model minus score of the first model.
        interval: confidence interval of the difference, from the paired bootstrap.
        p_value: two-sided p-value under the hypothesis that the models are equally good.
    """

    difference: float
    interval: Interval
    p_value: float


def compare_shares(first: Array, second: Array, seed: int) -> Comparison:
    """Compare the shares of rows that two models answer correctly, with McNemar's test.

    Args:
        first, second: 1 for each row that the model answers correctly, else 0, float64 [N].
        seed: random seed of the bootstrap interval.
    """
    resampled = resampled_ratios(second - first, np.ones(len(first)), seed)
    p_value = mcnemar_p_value(int(np.sum(first > second)), int(np.sum(second > first)))
    return Comparison(float(np.mean(second - first)), _percentiles(resampled), p_value)


def compare_ratios(
    first: tuple[Array, Array],
    second: tuple[Array, Array],
    seed: int,
    transform: Callable[[Array], Array] = np.asarray,
) -> Comparison:
    """Compare the scores transform(sum(values) / sum(weights)) of two models, with the paired bootstrap.

    Let k be the smaller of two counts: resampled differences <= 0, and resampled differences >= 0. The p-value is 2 (k
    + 1) / (R + 1), at most 1; the added 1 keeps the p-value above 0.

    Args:
        first: values and weights of the first model, float64 [N] each.
        second: values and weights of the second model, float64 [N] each.
        seed: random seed that selects the resampled rows.
        transform: function to apply to each ratio.
    """
    resampled = transform(resampled_ratios(*second, seed)) - transform(resampled_ratios(*first, seed))
    ratios = [transform(np.array(values.sum() / weights.sum())) for values, weights in (first, second)]
    smaller = min(np.sum(resampled <= 0), np.sum(resampled >= 0))
    p_value = min(1.0, 2 * (float(smaller) + 1) / (len(resampled) + 1))
    return Comparison(float(ratios[1] - ratios[0]), _percentiles(resampled), p_value)


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of the exact McNemar test.

    The test is a binomial test on the rows that exactly one of two models answers correctly.

    Args:
        only_first: number of rows that only the first model answers correctly.
        only_second: number of rows that only the second model answers correctly.
    """
    total, smaller = only_first + only_second, min(only_first, only_second)
    log_all = math.lgamma(total + 1) - total * math.log(2)
    tail = (log_all - math.lgamma(count + 1) - math.lgamma(total - count + 1) for count in range(smaller + 1))
    return min(1.0, 2 * math.fsum(map(math.exp, tail)))


def _percentiles(values: Array) -> Interval:
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(low), float(high))
