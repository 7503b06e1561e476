"""Compare logits filters with transformers, and penalties with their definitions."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation import logits_processors
from paddlenlp_ext.generation.logits_processors import LogitAdjustments
from tests.golden import DATA

GOLDEN = np.load(DATA / "logits_filters.npz")
LOGITS, SEEN = GOLDEN["logits"], GOLDEN["seen"].tolist()


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("penalty_1.3", lambda x: logits_processors.apply_repetition_penalty(x, SEEN, 1.3)),
        ("penalty_0.8", lambda x: logits_processors.apply_repetition_penalty(x, SEEN, 0.8)),
        ("temperature_0.6", lambda x: logits_processors.apply_temperature(x, 0.6)),
        ("top_k_1", lambda x: logits_processors.keep_top_k(x, 1)),
        ("top_k_7", lambda x: logits_processors.keep_top_k(x, 7)),
        ("top_p_0.1", lambda x: logits_processors.keep_top_p(x, 0.1)),
        ("top_p_0.7", lambda x: logits_processors.keep_top_p(x, 0.7)),
        ("top_p_0.95", lambda x: logits_processors.keep_top_p(x, 0.95)),
    ],
)
def test_filter_matches_transformers(name, ours):
    before = LOGITS.copy()
    np.testing.assert_allclose(ours(LOGITS), GOLDEN[name], rtol=1e-6)
    np.testing.assert_array_equal(LOGITS, before, err_msg="the filter wrote into its argument")


def test_filters_combined_match_transformers():
    logits = logits_processors.apply_repetition_penalty(LOGITS, SEEN, 1.3)
    logits = logits_processors.keep_top_p(
        logits_processors.keep_top_k(logits_processors.apply_temperature(logits, 0.6), 7), 0.7
    )
    np.testing.assert_allclose(logits, GOLDEN["chained"], rtol=1e-6)


def test_filters_neutral_values_change_nothing():
    same = logits_processors.apply_temperature(logits_processors.apply_repetition_penalty(LOGITS, SEEN, 1.0), 1.0)
    same = logits_processors.keep_top_p(logits_processors.keep_top_k(same, 0), 1.0)
    np.testing.assert_array_equal(same, LOGITS)
    np.testing.assert_array_equal(logits_processors.keep_top_k(LOGITS, 10_000), LOGITS)


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9, 0.9999])
def test_keep_top_p_large_vocabulary_is_sorted_prefix(top_p):
    """Test a flat row, whose nucleus is most of the vocabulary, and a peaked one."""
    noise = np.random.default_rng(3).standard_normal((2, 5000)).astype(np.float32)
    logits = noise * np.array([[0.1], [4.0]], dtype=np.float32)
    remaining = np.isfinite(logits_processors.keep_top_p(logits, top_p))
    for row, row_remaining in zip(logits, remaining, strict=True):
        probabilities = np.exp(row.astype(np.float64)) / np.exp(row.astype(np.float64)).sum()
        descending = np.argsort(-probabilities)
        num_kept = max(1, int(np.searchsorted(np.cumsum(probabilities[descending]), top_p)) + 1) if top_p else 1
        assert set(np.flatnonzero(row_remaining)) == set(descending[:num_kept])


@pytest.mark.parametrize("option", ["frequency_penalty", "presence_penalty"])
def test_logit_adjustments_penalties_subtract_from_generated_tokens(option):
    logits = paddle.to_tensor([[3.0, 2.0, 1.0, 0.0]])
    adjusted = LogitAdjustments(**{option: 0.5}).apply(logits, [0, 2, 0])[0]
    first = 2.0 if option == "frequency_penalty" else 2.5
    np.testing.assert_allclose(adjusted, [first, 2.0, 0.5, 0.0])
    assert LogitAdjustments(**{option: 0.5}).apply(logits, []) is logits
