"""Test the linear layer: product, bias format, frozen weights."""

from __future__ import annotations

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.nn.linear import Linear
from tests.common.arrays import normal


def make(bias: bool) -> Linear:
    layer = Linear(5, 3, bias)
    for seed, parameter in enumerate(layer.parameters()):
        parameter.set_value(normal(seed, *parameter.shape))
    return layer


def test_linear_multiplies_by_transposed_weight():
    layer, x = make(bias=True), normal(7, 2, 4, 5)
    assert layer.weight.shape == [3, 5] and layer.bias.shape == [3]
    expected = x @ layer.weight.numpy().T + layer.bias.numpy()
    np.testing.assert_allclose(layer(paddle.to_tensor(x)).numpy(), expected, rtol=0, atol=1e-6)


def test_linear_wider_bias_keeps_output_dtype():
    """Add an fp64 bias to an fp32 product, as autocast adds an fp32 bias to a half-precision product."""
    layer, x = make(bias=True), paddle.to_tensor(normal(7, 4, 5))
    output = layer(x)
    layer.bias = paddle.create_parameter([3], "float64", default_initializer=nn.initializer.Assign(layer.bias.numpy()))
    y = layer(x)
    assert y.dtype == paddle.float32
    np.testing.assert_array_equal(y.numpy(), output.numpy())
    y.sum().backward()
    assert layer.bias.grad.dtype == paddle.float64


def test_linear_frozen_weight_is_skipped_in_backward():
    """Check that the matmul's autograd node has no edge to the weight: only the input's gradient is computed."""
    layer = make(bias=False)
    x = paddle.to_tensor(normal(7, 4, 5), stop_gradient=False)
    for frozen in (True, False):
        layer.weight.stop_gradient = frozen
        y = layer(x)
        _, weight_edge = y.grad_fn.next_functions
        assert (weight_edge is None) == frozen
        y.sum().backward()
        assert (layer.weight.grad is None) == frozen
    np.testing.assert_allclose(x.grad.numpy(), 2 * np.tile(layer.weight.numpy().sum(0), (4, 1)), atol=1e-5)
