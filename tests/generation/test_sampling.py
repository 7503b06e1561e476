"""Compare logits filters with transformers, and draws with their distribution."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation import sampling
from paddlenlp_ext.generation.token_chooser import most_likely
from tests.golden import DATA

GOLDEN = np.load(DATA / "logits_filters.npz")
LOGITS, SEEN = GOLDEN["logits"], GOLDEN["seen"].tolist()


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("penalty_1.3", lambda x: sampling.apply_repetition_penalty(x, SEEN, 1.3)),
        ("penalty_0.8", lambda x: sampling.apply_repetition_penalty(x, SEEN, 0.8)),
        ("temperature_0.6", lambda x: sampling.apply_temperature(x, 0.6)),
        ("top_k_1", lambda x: sampling.keep_top_k(x, 1)),
        ("top_k_7", lambda x: sampling.keep_top_k(x, 7)),
        ("top_p_0.1", lambda x: sampling.keep_top_p(x, 0.1)),
        ("top_p_0.7", lambda x: sampling.keep_top_p(x, 0.7)),
        ("top_p_0.95", lambda x: sampling.keep_top_p(x, 0.95)),
    ],
)
def test_filter_matches_transformers(name, ours):
    before = LOGITS.copy()
    np.testing.assert_allclose(ours(LOGITS), GOLDEN[name], rtol=1e-6)
    np.testing.assert_array_equal(LOGITS, before, err_msg="the filter wrote into its argument")


def test_filters_combined_match_transformers():
    logits = sampling.apply_repetition_penalty(LOGITS, SEEN, 1.3)
    logits = sampling.keep_top_p(sampling.keep_top_k(sampling.apply_temperature(logits, 0.6), 7), 0.7)
    np.testing.assert_allclose(logits, GOLDEN["chained"], rtol=1e-6)


def test_filters_neutral_values_change_nothing():
    same = sampling.apply_temperature(sampling.apply_repetition_penalty(LOGITS, SEEN, 1.0), 1.0)
    same = sampling.keep_top_p(sampling.keep_top_k(same, 0), 1.0)
    np.testing.assert_array_equal(same, LOGITS)
    np.testing.assert_array_equal(sampling.keep_top_k(LOGITS, 10_000), LOGITS)


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9, 0.9999])
def test_keep_top_p_large_vocabulary_is_sorted_prefix(top_p):
    """Test a flat row, whose nucleus is most of the vocabulary, and a peaked one."""
    noise = np.random.default_rng(3).standard_normal((2, 5000)).astype(np.float32)
    logits = noise * np.array([[0.1], [4.0]], dtype=np.float32)
    remaining = np.isfinite(sampling.keep_top_p(logits, top_p))
    for row, row_remaining in zip(logits, remaining, strict=True):
        probabilities = np.exp(row.astype(np.float64)) / np.exp(row.astype(np.float64)).sum()
        descending = np.argsort(-probabilities)
        num_kept = max(1, int(np.searchsorted(np.cumsum(probabilities[descending]), top_p)) + 1) if top_p else 1
        assert set(np.flatnonzero(row_remaining)) == set(descending[:num_kept])


def test_greedy_takes_largest_and_lowest_id_of_ties():
    np.testing.assert_array_equal(sampling.greedy(np.array([[0, 5, 5], [7, 1, 2]], np.float32)), [1, 0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_most_likely_of_negative_logits_is_the_largest(dtype):
    assert most_likely(paddle.to_tensor([[-3.0, -1.0, -2.0], [1.0, -5.0, 2.0]]).astype(dtype)) == [1, 2]


def test_row_sampler_draws_follow_distribution():
    logits = np.array([[1.0, -np.inf, 0.0, 2.0]], dtype=np.float32)
    sampler = sampling.RowSampler(seed=0)
    draws = np.array([sampler.draw(logits, [0])[0] for _ in range(20_000)])
    weights = np.exp(np.array([1.0, -np.inf, 0.0, 2.0]))
    frequencies = np.bincount(draws, minlength=4) / len(draws)
    np.testing.assert_allclose(frequencies, weights / weights.sum(), atol=0.012)
    assert frequencies[1] == 0


def test_row_sampler_is_independent_of_batch():
    logits = np.random.default_rng(5).standard_normal((6, 3, 50)).astype(np.float32)  # step, row, vocab
    together = sampling.RowSampler(seed=11)
    batched = [together.draw(step, [0, 1, 2]) for step in logits]
    single_sampler = sampling.RowSampler(seed=11)
    single = [single_sampler.draw(step[2:], [2])[0] for step in logits]
    assert [int(tokens[2]) for tokens in batched] == [int(token) for token in single]
    other_seed = sampling.RowSampler(seed=12)
    assert [int(other_seed.draw(step[2:], [2])[0]) for step in logits] != [int(token) for token in single]
    np.testing.assert_raises(AssertionError, np.testing.assert_array_equal, *np.array(batched).T[:2])


def test_row_sampler_rows_with_equal_logits_draw_independently():
    """Count pairs of rows that draw the same of 200 equally likely tokens: 1 of 200 by chance, all from one stream."""
    sampler = sampling.RowSampler(seed=3)
    draws = np.array([sampler.draw(np.zeros((8, 200), np.float32), range(8)) for _ in range(40)])
    same = (draws[:, :, None] == draws[:, None, :]).sum() - draws.size
    assert same / (draws.size * 7) < 0.03
    again = sampling.RowSampler(seed=3)
    assert [int(again.draw(np.zeros((1, 200), np.float32), [5])[0]) for _ in range(40)] == draws[:, 5].tolist()


def test_row_sampler_nan_row_raises():
    """Test NaN logits, as of a diverged model, with all filters."""
    logits = np.full((1, 9), np.nan, np.float32)
    with pytest.raises(ValueError, match="all logits of a row are NaN; the model's weights are damaged"):
        sampling.RowSampler(seed=0).draw(sampling.keep_top_p(sampling.keep_top_k(logits, 3), 0.7), [0])
