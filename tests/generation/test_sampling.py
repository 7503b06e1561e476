"""Compare draws with their distribution, and their dependence on the other rows of a batch."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation.logits_processors import keep_top_k, keep_top_p
from paddlenlp_ext.generation.sampling import RowSampler, greedy, most_likely


def test_greedy_takes_largest_and_lowest_id_of_ties():
    np.testing.assert_array_equal(greedy(np.array([[0, 5, 5], [7, 1, 2]], np.float32)), [1, 0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_most_likely_of_negative_logits_is_the_largest(dtype):
    assert most_likely(paddle.to_tensor([[-3.0, -1.0, -2.0], [1.0, -5.0, 2.0]]).astype(dtype)) == [1, 2]


def test_row_sampler_draws_follow_distribution():
    logits = np.array([[1.0, -np.inf, 0.0, 2.0]], dtype=np.float32)
    sampler = RowSampler(seed=0)
    draws = np.array([sampler.draw(logits, [0])[0] for _ in range(20_000)])
    weights = np.exp(np.array([1.0, -np.inf, 0.0, 2.0]))
    frequencies = np.bincount(draws, minlength=4) / len(draws)
    np.testing.assert_allclose(frequencies, weights / weights.sum(), atol=0.012)
    assert frequencies[1] == 0


def test_row_sampler_is_independent_of_batch():
    logits = np.random.default_rng(5).standard_normal((6, 3, 50)).astype(np.float32)  # step, row, vocab
    together = RowSampler(seed=11)
    batched = [together.draw(step, [0, 1, 2]) for step in logits]
    single_sampler = RowSampler(seed=11)
    single = [single_sampler.draw(step[2:], [2])[0] for step in logits]
    assert [int(tokens[2]) for tokens in batched] == [int(token) for token in single]
    other_seed = RowSampler(seed=12)
    assert [int(other_seed.draw(step[2:], [2])[0]) for step in logits] != [int(token) for token in single]
    np.testing.assert_raises(AssertionError, np.testing.assert_array_equal, *np.array(batched).T[:2])


def test_row_sampler_rows_with_equal_logits_draw_independently():
    """Count pairs of rows that draw the same of 200 equally likely tokens: 1 of 200 by chance, all from one stream."""
    sampler = RowSampler(seed=3)
    draws = np.array([sampler.draw(np.zeros((8, 200), np.float32), range(8)) for _ in range(40)])
    same = (draws[:, :, None] == draws[:, None, :]).sum() - draws.size
    assert same / (draws.size * 7) < 0.03
    again = RowSampler(seed=3)
    assert [int(again.draw(np.zeros((1, 200), np.float32), [5])[0]) for _ in range(40)] == draws[:, 5].tolist()


def test_row_sampler_nan_row_raises():
    """Test NaN logits, as of a diverged model, with all filters."""
    logits = np.full((1, 9), np.nan, np.float32)
    with pytest.raises(ValueError, match="all logits of a row are NaN; the model's weights are damaged"):
        RowSampler(seed=0).draw(keep_top_p(keep_top_k(logits, 3), 0.7), [0])
