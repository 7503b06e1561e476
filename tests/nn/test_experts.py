"""Expert layer against a loop over tokens in double precision."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.nn.experts import ExpertShape, MixtureOfExperts
from paddlenlp_ext.nn.routers import RouterOptions
from tests.common.arrays import normal

SHAPE = ExpertShape(
    num_experts=5,
    intermediate_size=6,
    router=RouterOptions(kind="softmax", top_k=2),
    shared_size=3,
    shared_name="shared_expert",
    gates_shared=True,
)


def build(shape=SHAPE, hidden=7):
    layer = MixtureOfExperts(hidden, shape)
    for number, (_, parameter) in enumerate(layer.named_parameters()):
        parameter.set_value(0.5 * normal(number, *parameter.shape))
    return layer


def by_token(layer, x_TD):
    """Return the outputs [T, D] of a loop over tokens and their experts, float64."""
    values = {name: parameter.numpy().astype(np.float64) for name, parameter in layer.named_parameters()}

    def feed_forward(x, gate_up, down):
        gate, up = np.split(gate_up @ x, 2)
        return down @ (gate / (1 + np.exp(-gate)) * up)

    rows = []
    for x in x_TD.astype(np.float64):
        scores = np.exp(values["gate.weight"] @ x)
        experts = np.argsort(-scores)[:2]
        weights = scores[experts] / scores[experts].sum()
        y = sum(
            weight
            * feed_forward(x, values["experts.gate_up_proj.weight"][expert], values["experts.down_proj.weight"][expert])
            for weight, expert in zip(weights, experts, strict=True)
        )
        shared = np.concatenate([values["shared_expert.gate_proj.weight"], values["shared_expert.up_proj.weight"]])
        gate = 1 / (1 + np.exp(-values["shared_expert_gate.weight"] @ x))
        rows.append(y + gate * feed_forward(x, shared, values["shared_expert.down_proj.weight"]))
    return np.stack(rows)


@pytest.mark.parametrize("tokens", [1, 13])
def test_mixture_of_experts_matches_a_loop_over_tokens(tokens):
    layer, x = build(), normal(9, tokens, 7)
    np.testing.assert_allclose(layer(paddle.to_tensor(x)).numpy(), by_token(layer, x), rtol=0, atol=2e-5)
    batch = layer(paddle.to_tensor(x.reshape(1, tokens, 7)))
    assert batch.shape == [1, tokens, 7]


def test_mixture_of_experts_gradient_matches_differences():
    layer, x, direction = build(), normal(9, 6, 7), normal(10, 6, 7)
    tensor = paddle.to_tensor(x, stop_gradient=False)
    (layer(tensor) * paddle.to_tensor(direction)).sum().backward()
    step, shift = 1e-3, normal(11, 6, 7)
    difference = (by_token(layer, x + step * shift) - by_token(layer, x - step * shift)) / (2 * step)
    assert float((tensor.grad.numpy() * shift).sum()) == pytest.approx((difference * direction).sum(), rel=1e-4)


def test_experts_that_no_token_chooses_have_zero_gradients():
    layer = build()
    layer(paddle.to_tensor(normal(9, 1, 7))).sum().backward()
    gradients = layer.experts.gate_up_proj.weight.grad.numpy(), layer.experts.down_proj.weight.grad.numpy()
    for gradient in gradients:
        assert np.isfinite(gradient).all() and (np.abs(gradient).max(axis=(1, 2)) > 0).sum() == 2


def test_experts_of_several_processes_sum_to_those_of_one():
    """Two layers with a part of the experts each, as under tensor parallelism."""
    layer, x = build(), paddle.to_tensor(normal(9, 13, 7))
    weights, experts = layer.gate(x)
    expected, total = layer.experts(x, weights, experts).numpy(), 0.0
    parts = [linear.weight.numpy() for linear in (layer.experts.gate_up_proj, layer.experts.down_proj)]
    for first, count in ((0, 2), (2, 3)):
        shape = ExpertShape(num_experts=count, intermediate_size=6, router=SHAPE.router)
        part = MixtureOfExperts(7, shape).experts
        part.first = first
        for linear, values in zip((part.gate_up_proj, part.down_proj), parts, strict=True):
            linear.weight.set_value(values[first : first + count])
        total = total + part(x, weights, experts).numpy()
    np.testing.assert_allclose(total, expected, rtol=0, atol=1e-5)
