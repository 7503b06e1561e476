"""Embedding noise of NEFTune against the paper's formula, for each document."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.trainer.neftune import EmbeddingNoise, noise_scale, token_embedding
from tests.common.training import make_model

ALPHA, HIDDEN = 5.0, 32


def noise_of(model, noise, lengths, seed=0):
    """Return the noise that the hook adds to a row with documents of these lengths."""
    embedding = token_embedding(model)
    ids = paddle.zeros([1, sum(lengths)], "int64")
    paddle.seed(seed)
    with noise.documents([lengths]):
        noisy = embedding(ids)
    return (noisy - paddle.nn.functional.embedding(ids, embedding.weight)).numpy()[0]


@pytest.mark.parametrize("lora", [False, True])
def test_embedding_noise_is_uniform_within_the_bound_of_each_document(lora):
    model = make_model(lora)
    model.train()
    noise = EmbeddingNoise(model, ALPHA)
    lengths = (400, 100, 1)
    added = noise_of(model, noise, lengths)
    start = 0
    for length in lengths:
        bound = ALPHA / np.sqrt(length * HIDDEN)
        part = added[start : start + length] / bound
        assert np.abs(part).max() <= 1 + 1e-5
        if length > 1:
            assert np.abs(part).max() > 0.99
            assert part.mean() == pytest.approx(0, abs=0.05)
            assert part.var() == pytest.approx(1 / 3, rel=0.05)
        start += length


def test_embedding_noise_follows_the_seed_and_acts_only_in_training():
    model = make_model()
    model.train()
    noise = EmbeddingNoise(model, ALPHA)
    assert np.array_equal(noise_of(model, noise, (6,), seed=3), noise_of(model, noise, (6,), seed=3))
    assert not np.array_equal(noise_of(model, noise, (6,), seed=3), noise_of(model, noise, (6,), seed=4))
    ids = paddle.zeros([1, 6], "int64")
    silent = token_embedding(model)(ids).numpy()
    assert np.array_equal(silent[0, 0], token_embedding(model).weight.numpy()[0])
    model.eval()
    assert not noise_of(model, noise, (6,)).any()
    model.train()
    noise.remove()
    assert not noise_of(model, noise, (6,)).any()


def test_noise_scale_of_batch_rows_follows_document_lengths():
    scale = noise_scale(AttentionLayout.from_documents([(3, 1), (4,)]), 2, 1.0)[:, :, 0]
    np.testing.assert_allclose(scale, [[6**-0.5] * 3 + [2**-0.5], [8**-0.5] * 4], rtol=1e-6)


def test_noise_scale_of_documents_that_continue_another_counts_both():
    layout = AttentionLayout.from_documents([[3, 1, 6, 2]], document_parents=[[None, 0, 0, None]])
    scale = noise_scale(layout, 2, 1.0)[0, :, 0]
    np.testing.assert_allclose(1 / scale**2, 2 * np.repeat([9, 4, 9, 2], [3, 1, 6, 2]), rtol=1e-6)
