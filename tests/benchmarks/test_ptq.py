"""Scores of quantized models: perplexity and divergence against their formulas in NumPy."""

from __future__ import annotations

import numpy as np
import paddle

from benchmarks.ptq import score
from paddlenlp_ext import AutoModelForCausalLM
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.models.causal_lm import CausalLM
from tests.generation.tiny_models import FAMILIES, SIZES

ROWS = [
    EncodedRow(np.array([3, 14, 15, 92, 65]), np.array([0, 0, 1, 0, 1], bool), 0),
    EncodedRow(np.array([35, 8, 9]), np.array([0, 1, 1], bool), 1),
]


def tiny(seed: int) -> CausalLM:
    model = AutoModelForCausalLM.from_config({**SIZES, **FAMILIES["llama_grouped_heads"]}, seed=seed)
    model.eval()
    return model


def log_probabilities(model: CausalLM) -> np.ndarray:
    """Return log-probabilities [targets, vocabulary] in float64."""
    logits = [model(paddle.to_tensor(row.tokens[None])).numpy()[0, :-1][row.loss_mask[1:]] for row in ROWS]
    z = np.concatenate(logits).astype(np.float64)
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def test_score_has_the_means_over_target_tokens():
    model, full = tiny(1), tiny(2)
    found, expected = log_probabilities(model), log_probabilities(full)
    loss = -np.mean([each[token] for each, token in zip(found, (15, 65, 8, 9), strict=True)])
    scores = score(model, full, ROWS)
    assert np.isclose(scores["perplexity"], np.exp(loss), rtol=1e-4)
    assert np.isclose(scores["divergence"], (np.exp(expected) * (expected - found)).sum(axis=1).mean(), rtol=1e-4)
    assert abs(score(full, full, ROWS)["divergence"]) < 1e-6
