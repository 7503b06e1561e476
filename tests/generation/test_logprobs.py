"""Log-probabilities over a vocabulary of realistic size."""

from __future__ import annotations

import numpy as np
import paddle

from paddlenlp_ext.generation.logprobs import token_logprobs


def test_token_logprobs_of_a_large_vocabulary_equal_log_softmax_in_float64():
    logits = np.random.default_rng(0).normal(0, 1, (2, 60_000)).astype(np.float32)
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    found = token_logprobs(paddle.to_tensor(logits), [7, 59_999], 2)
    np.testing.assert_allclose([each.logprob for each in found], [exact[0, 7], exact[1, 59_999]], rtol=1e-9)
    for line, each in zip(exact, found, strict=True):
        assert [token for token, _ in each.top] == np.argsort(-line)[:2].tolist()
        np.testing.assert_allclose([value for _, value in each.top], np.sort(line)[:-3:-1], rtol=1e-9)
