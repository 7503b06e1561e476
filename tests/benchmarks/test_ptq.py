"""Scores of quantized models: perplexity and divergence against their formulas in NumPy."""

from __future__ import annotations

import numpy as np
import paddle

from benchmarks.ptq import score
from paddlenlp_ext import AutoModelForCausalLM
from paddlenlp_ext.models.causal_lm import CausalLM
from tests.generation.tiny_models import FAMILIES, SIZES

ROWS = [np.array([3, 14, 15, 92, 65]), np.array([35, 8, 9])]


def tiny(seed: int) -> CausalLM:
    model = AutoModelForCausalLM.from_config({**SIZES, **FAMILIES["llama_grouped_heads"]}, seed=seed)
    model.eval()
    return model


def log_probabilities(model: CausalLM) -> list[np.ndarray]:
    logits = [model(paddle.to_tensor(row[None])).numpy()[0, :-1].astype(np.float64) for row in ROWS]
    return [each - np.log(np.exp(each).sum(axis=1, keepdims=True)) for each in logits]


def test_score_has_the_means_over_all_tokens():
    model, full = tiny(1), tiny(2)
    found, expected = log_probabilities(model), log_probabilities(full)
    loss = [
        -each[position, token] for each, row in zip(found, ROWS, strict=True) for position, token in enumerate(row[1:])
    ]
    divergence = [(np.exp(p) * (p - q)).sum(axis=1) for p, q in zip(expected, found, strict=True)]
    scores = score(model, full, ROWS)
    assert np.isclose(scores["perplexity"], np.exp(np.mean(loss)), rtol=1e-4)
    assert np.isclose(scores["divergence"], np.mean(np.concatenate(divergence)), rtol=1e-4)
    assert abs(score(full, full, ROWS)["divergence"]) < 1e-6
