"""Intervals and tests against their definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from paddlenlp_ext.evaluation.row_scores import CORPUS, RATIO_EXP, SHARE, Scores
from paddlenlp_ext.evaluation.statistics import (
    bootstrap_interval,
    compare_ratios,
    compare_shares,
    mcnemar_p_value,
    resampled_ratios,
    wilson_interval,
)

Z = 1.959963984540054


@pytest.mark.parametrize(("successes", "rows"), [(3, 10), (0, 7), (7, 7), (159, 200)])
def test_wilson_interval_bounds_are_the_shares_whose_test_just_rejects(successes, rows):
    """Check that each bound p solves (share - p)^2 = z^2 p (1 - p) / n, which defines the score interval."""
    interval, share = wilson_interval(successes, rows), successes / rows
    bounds = sorted(np.roots([1 + Z * Z / rows, -(2 * share + Z * Z / rows), share * share]).tolist())
    assert [interval.low, interval.high] == pytest.approx(bounds, abs=1e-9)
    assert interval.low <= share + 1e-12 and share - 1e-12 <= interval.high


def test_wilson_interval_without_rows_is_an_error():
    with pytest.raises(ValueError, match="at least one row"):
        wilson_interval(0, 0)


def test_resampled_ratios_are_those_of_the_rows_drawn_by_the_seed():
    values, weights = np.array([3.0, 1.0, 7.0]), np.array([2.0, 5.0, 1.0])
    rows = np.random.default_rng(5).integers(0, 3, (40, 3))
    expected = [sum(values[row]) / sum(weights[row]) for row in rows]
    np.testing.assert_allclose(resampled_ratios(values, weights, 5, 40), expected, rtol=1e-12)


def test_bootstrap_interval_transforms_the_quantiles_of_the_resamples():
    values, weights = np.random.default_rng(0).gamma(2.0, size=(2, 30))
    ratios = np.exp(resampled_ratios(values, weights, 1))
    interval = bootstrap_interval(values, weights, 1, np.exp)
    assert (interval.low, interval.high) == pytest.approx(tuple(np.quantile(ratios, [0.025, 0.975])))


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 5), (4, 4), (7, 2), (0, 9)])
def test_mcnemar_p_value_counts_the_outcomes_of_a_fair_coin(first, second):
    total = first + second
    outcomes = [sum(flips) for flips in itertools.product((0, 1), repeat=total)]
    extreme = [heads for heads in outcomes if min(heads, total - heads) <= min(first, second)]
    assert mcnemar_p_value(first, second) == pytest.approx(min(1.0, len(extreme) / len(outcomes)))


def test_mcnemar_p_value_of_many_rows_does_not_overflow():
    assert mcnemar_p_value(2000, 2100) == pytest.approx(math.erfc(99 / math.sqrt(2 * 4100)), rel=1e-2)


def test_compare_shares_resamples_rows_in_pairs():
    base = np.array([1.0, 0, 0, 1, 0, 1, 0, 0])
    better = np.maximum(base, [0, 1, 1, 0, 1, 0, 0, 0])
    compared = compare_shares(base, better, 0)
    assert compared.difference == pytest.approx(3 / 8)
    assert compared.p_value == pytest.approx(2 / 2**3)
    rows = np.random.default_rng(0).integers(0, 8, (2000, 8))
    differences = (better - base)[rows].mean(axis=1)
    assert compared.interval.low == pytest.approx(np.quantile(differences, 0.025))


def test_compare_ratios_of_equal_models_finds_no_difference():
    pair = (np.array([1.0, 2, 5]), np.array([1.0, 1, 3]))
    compared = compare_ratios(pair, pair, 3, np.exp)
    assert (compared.difference, compared.interval.low, compared.p_value) == (0.0, 0.0, 1.0)


def test_compare_ratios_of_a_clear_difference_has_the_least_p_value():
    tokens = np.full(50, 10.0)
    losses = np.random.default_rng(1).normal(30.0, 2.0, 50)
    compared = compare_ratios((losses, tokens), (losses - 5, tokens), 0, np.exp)
    assert compared.difference == pytest.approx(np.exp(losses.mean() / 10 - 0.5) - np.exp(losses.mean() / 10))
    assert compared.interval.high < 0
    assert compared.p_value == pytest.approx(2 / 2001)


def test_scores_of_the_corpus_or_of_other_rows_have_no_comparison():
    corpus = Scores.of_rows(CORPUS, [0.4])
    assert corpus.interval(0) is None and corpus.compare(corpus, 0) is None
    ones = np.ones(3)
    windows = [Scores(RATIO_EXP, ones, ones, parts) for parts in ((40.0, 40.0, 1.0), (40.0, 39.0, 2.0))]
    assert windows[0].compare(windows[1], 0) is None
    shares = Scores.of_rows(SHARE, [1.0, 0.0])
    assert shares.format(shares.value) == "50.0 %" and shares.format(-0.125, signed=True) == "-12.5 pp"
