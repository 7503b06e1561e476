"""Experts whose router has its own norm, compared with the formula in NumPy."""

from __future__ import annotations

import numpy as np
import paddle

from paddlenlp_ext.nn.experts import ExpertShape
from paddlenlp_ext.nn.normed_mixture import NormedMixture
from paddlenlp_ext.nn.routers import RouterOptions
from tests.common.arrays import normal

HIDDEN, EXPERTS, INNER, TOP, EPSILON = 10, 5, 6, 2, 0.1


def rms(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)


@paddle.no_grad()
def test_normed_mixture_matches_the_formula():
    router = RouterOptions(kind="softmax", top_k=TOP)
    mixture = NormedMixture(HIDDEN, ExpertShape(num_experts=EXPERTS, intermediate_size=INNER, router=router), EPSILON)
    for index, parameter in enumerate(mixture.parameters()):
        parameter.set_value(paddle.to_tensor(normal(index, *parameter.shape)))
    arrays = {name: parameter.numpy() for name, parameter in mixture.named_parameters()}
    x_TD = normal(9, 7, HIDDEN)
    found = mixture(paddle.to_tensor(x_TD)).numpy()

    logits = (rms(x_TD) * arrays["router_scale"] / np.sqrt(HIDDEN)) @ arrays["gate.weight"].T
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    normed = rms(x_TD) * arrays["norm.weight"]
    for token, row in enumerate(normed):
        chosen = np.argsort(-scores[token])[:TOP]
        total = np.zeros(HIDDEN)
        for expert in chosen:
            gate, up = np.split(arrays["experts.gate_up_proj.weight"][expert] @ row, 2)
            output = arrays["experts.down_proj.weight"][expert] @ (gate / (1 + np.exp(-gate)) * up)
            weight = scores[token, expert] / scores[token, chosen].sum() * arrays["per_expert_scale"][expert]
            total += weight * output
        np.testing.assert_allclose(found[token], total, rtol=0, atol=2e-4)
