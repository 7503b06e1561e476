"""Bottleneck adapters against the papers' formulas in NumPy, and their training."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.peft.methods.bottleneck import ACTIVATIONS, BottleneckConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.adapters import logits_of, loss_of, state_of, tiny_model, train

NUMPY_ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "tanh": np.tanh,
}


def adapted(**options: Any) -> PeftModel:
    """Build a model whose adapter has random values in all tensors."""
    model = get_peft_model(tiny_model(), BottleneckConfig(**{"size": 5, **options}))
    generator = np.random.default_rng(0)
    for tensor in model.adapter_state().values():
        tensor.set_value(0.3 * generator.standard_normal(tensor.shape).astype(np.float32))
    model.eval()
    return model


@pytest.mark.parametrize(
    ("kind", "activation"), list(itertools.product(("houlsby", "parallel"), ACTIVATIONS)), ids=lambda value: value
)
def test_bottleneck_forward_matches_formula(kind: str, activation: str):
    layer = adapted(kind=kind, activation=activation, scale=1.7).base_model.model.layers[0].mlp
    x = np.random.default_rng(1).standard_normal((2, 3, 36)).astype(np.float32)
    h = layer.base(paddle.to_tensor(x)).numpy()
    own = {name: tensor.numpy().astype(np.float64) for name, tensor in layer.own_state().items()}
    z = x if kind == "parallel" else h
    inner = NUMPY_ACTIVATIONS[activation](z @ own["adapter_down.weight"].T + own["adapter_down.bias"])
    expected = h + 1.7 * (inner @ own["adapter_up.weight"].T + own["adapter_up.bias"])
    np.testing.assert_allclose(layer(paddle.to_tensor(x)).numpy(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["houlsby", "parallel"])
def test_bottleneck_gradients_match_formula(kind: str):
    """Compare gradients of a relu adapter with derivatives by hand; g is the gradient of y."""
    layer = adapted(kind=kind, activation="relu", scale=0.5).base_model.model.layers[1].mlp
    generator = np.random.default_rng(1)
    x, g = (generator.standard_normal((6, 36)).astype(np.float32) for _ in range(2))
    layer(paddle.to_tensor(x)).backward(paddle.to_tensor(g))
    z = (x if kind == "parallel" else layer.base(paddle.to_tensor(x)).numpy()).astype(np.float64)
    own = {name: tensor.numpy().astype(np.float64) for name, tensor in layer.own_state().items()}
    before = z @ own["adapter_down.weight"].T + own["adapter_down.bias"]
    hidden = np.maximum(before, 0)
    hidden_gradient = 0.5 * (g @ own["adapter_up.weight"]) * (before > 0)
    expected = {
        "adapter_up.weight": 0.5 * g.T @ hidden,
        "adapter_up.bias": 0.5 * g.sum(0),
        "adapter_down.weight": hidden_gradient.T @ z,
        "adapter_down.bias": hidden_gradient.sum(0),
    }
    for name, tensor in layer.own_state().items():
        np.testing.assert_allclose(tensor.grad.numpy(), expected[name], rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("where", "leaves"),
    [("attention", {"self_attn"}), ("mlp", {"mlp"}), ("both", {"self_attn", "mlp"})],
)
def test_bottleneck_where_selects_sublayers(where: str, leaves: set[str]):
    state = adapted(where=where).adapter_state()
    assert {name.split(".")[3] for name in state} == leaves
    assert len(state) == 4 * 2 * len(leaves)
    assert state[f"model.layers.0.{min(leaves)}.adapter_down.weight"].shape == [5, 36]


@pytest.mark.parametrize("kind", ["houlsby", "parallel"])
def test_bottleneck_start_equals_base_bitwise(kind: str):
    model = get_peft_model(tiny_model(), BottleneckConfig(kind=kind, activation="gelu"))
    model.eval()
    assert np.array_equal(logits_of(model), logits_of(tiny_model()))


@pytest.mark.parametrize("kind", ["houlsby", "parallel"])
def test_bottleneck_training_lowers_loss(kind: str):
    model = get_peft_model(tiny_model(), BottleneckConfig(size=8, kind=kind))
    before = float(loss_of(model))
    train(model, steps=40)
    assert float(loss_of(model)) < 0.6 * before


def test_bottleneck_saved_config_keeps_every_option(tmp_path: Path):
    options = {"size": 3, "where": "mlp", "kind": "parallel", "activation": "tanh", "scale": 4.0, "dropout": 0.1}
    model = adapted(**options)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert loaded.peft_config == model.peft_config
    assert np.array_equal(logits_of(loaded), logits_of(model))
    warm = get_peft_model(tiny_model(), BottleneckConfig(path=str(tmp_path), dropout=0.3))
    assert warm.peft_config == BottleneckConfig(**{**options, "dropout": 0.3, "path": str(tmp_path)})


def test_bottleneck_dropout_acts_in_training_only():
    model = adapted(dropout=0.5)
    assert np.array_equal(logits_of(model), logits_of(model))
    model.train()
    assert not np.array_equal(logits_of(model), logits_of(model))


def test_bottleneck_parameters_and_output_have_base_dtype():
    paddle.set_default_dtype("float64")
    try:
        from paddlenlp_ext.nn.feed_forward import FeedForward

        layer = BottleneckConfig(size=2).wrap("mlp", FeedForward(4, 6), seed=0)
    finally:
        paddle.set_default_dtype("float32")
    assert {tensor.dtype for tensor in state_of_dtype(layer)} == {paddle.float64}


def state_of_dtype(layer: paddle.nn.Layer) -> list[paddle.Tensor]:
    assert state_of(layer)
    return list(layer.own_state().values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "adapter_bottleneck_dim: 0 is out of range"),
        ({"where": "head"}, 'adapter_location: "head" is not one of: attention, mlp, both'),
        ({"kind": "serial"}, 'adapter_type: "serial" is not one of: houlsby, parallel'),
        ({"activation": "step"}, 'activation: "step" is not one of'),
        ({"scale": 0.0}, "scale: 0.0 is out of range"),
        ({"dropout": 1.0}, "dropout: 1.0 is out of range"),
    ],
)
def test_bottleneck_config_value_out_of_range_raises(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        BottleneckConfig(**options)
