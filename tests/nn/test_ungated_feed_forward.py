"""Activations of feed-forward blocks without a gate: values and gradients against the formulas."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.nn.ungated_feed_forward import XIELU, SquaredReLU, UngatedFeedForward


def softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(x))


def xielu(x: np.ndarray, alpha_p: float, alpha_n: float, beta: float = 0.5, eps: float = -1e-6) -> np.ndarray:
    negative = (np.expm1(np.minimum(x, eps)) - x) * (beta + softplus(alpha_n))
    return np.where(x > 0, softplus(alpha_p) * x * x, negative) + beta * x


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 2, (3, 5)).astype(np.float32)


def test_squared_relu_has_the_values_and_gradients_of_the_formula(x):
    tensor = paddle.to_tensor(x, stop_gradient=False)
    y = SquaredReLU()(tensor)
    y.sum().backward()
    np.testing.assert_allclose(y.numpy(), np.maximum(x, 0) ** 2, rtol=1e-6)
    np.testing.assert_allclose(tensor.grad.numpy(), 2 * np.maximum(x, 0), rtol=1e-6)


def test_xielu_has_the_values_and_gradients_of_the_formula(x):
    layer, tensor, weights = XIELU(), paddle.to_tensor(x, stop_gradient=False), np.linspace(-1, 1, 15).reshape(3, 5)
    alpha_p, alpha_n = (parameter.item() for parameter in (layer.alpha_p, layer.alpha_n))
    assert (softplus(alpha_p), softplus(alpha_n) + 0.5) == pytest.approx((0.8, 0.8), abs=1e-3), "initial values"
    y = layer(tensor)
    (y * paddle.to_tensor(weights.astype(np.float32))).sum().backward()
    np.testing.assert_allclose(y.numpy(), xielu(x, alpha_p, alpha_n), rtol=1e-5, atol=1e-6)

    step = 1e-4
    wide = x.astype(np.float64)

    def difference(up: np.ndarray, down: np.ndarray) -> np.ndarray:
        return (up - down) / (2 * step)

    by_x = difference(xielu(wide + step, alpha_p, alpha_n), xielu(wide - step, alpha_p, alpha_n)) * weights
    by_p = difference(xielu(wide, alpha_p + step, alpha_n), xielu(wide, alpha_p - step, alpha_n)) * weights
    by_n = difference(xielu(wide, alpha_p, alpha_n + step), xielu(wide, alpha_p, alpha_n - step)) * weights
    np.testing.assert_allclose(tensor.grad.numpy(), by_x, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer.alpha_p.grad.numpy(), [by_p.sum()], rtol=1e-4)
    np.testing.assert_allclose(layer.alpha_n.grad.numpy(), [by_n.sum()], rtol=1e-4)
    assert layer.beta.stop_gradient and layer.eps.stop_gradient


def test_ungated_feed_forward_has_no_gate_projection():
    block = UngatedFeedForward(4, 6, False, "relu2")
    names = {name for name, _ in block.named_parameters()}
    assert names == {"up_proj.weight", "down_proj.weight"}
    assert block(paddle.ones([2, 3, 4])).shape == [2, 3, 4]
