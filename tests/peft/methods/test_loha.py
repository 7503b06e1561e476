"""LoHa: formula, both forward paths, scale, ranges of options."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.peft.methods.loha import LoHaConfig, LoHaLinear


def random_layer(rank: int, alpha: float) -> LoHaLinear:
    layer = LoHaConfig(rank=rank, alpha=alpha).wrap("x", Linear(36, 44), seed=0)
    generator = np.random.default_rng(0)
    for tensor in layer.own_state().values():
        tensor.set_value(generator.standard_normal(tensor.shape).astype(np.float32))
    return layer


@pytest.mark.parametrize("rank", [1, 4, 5, 9])
def test_loha_both_forward_paths_match_formula(rank: int):
    """Test the path through rank * rank columns, used here up to rank 4, and the one through the product."""
    layer = random_layer(rank, alpha=rank / 2)
    own = {name: tensor.numpy() for name, tensor in layer.own_state().items()}
    expected = 0.5 * (own["hada_w1_a"] @ own["hada_w1_b"]) * (own["hada_w2_a"] @ own["hada_w2_b"])
    np.testing.assert_allclose(layer.delta_weight().numpy(), expected, rtol=1e-4, atol=1e-5)
    x = np.random.default_rng(1).standard_normal((3, 5, 36)).astype(np.float32)
    out = layer(paddle.to_tensor(x)).numpy() - layer.base(paddle.to_tensor(x)).numpy()
    np.testing.assert_allclose(out, x @ expected.T, rtol=1e-4, atol=1e-3)


def test_loha_low_rank_factors_have_squared_rank():
    layer = random_layer(3, alpha=6)
    a, b = layer.low_rank_factors()
    assert (a.shape, b.shape) == ([9, 36], [44, 9])
    np.testing.assert_allclose((b @ a).numpy(), layer.delta_weight().numpy(), rtol=1e-4, atol=1e-4)
    assert random_layer(6, alpha=6).low_rank_factors() is None


def test_loha_update_starts_at_zero_and_trains():
    layer = LoHaConfig(rank=4).wrap("x", Linear(36, 44), seed=0)
    assert not layer.delta_weight().numpy().any()
    assert {name for name, tensor in layer.own_state().items() if not tensor.numpy().any()} == {"hada_w2_b"}
    layer(paddle.ones([1, 36])).sum().backward()
    assert layer.hada_w2_b.grad.numpy().any()


@pytest.mark.parametrize(
    ("settings", "scaling"),
    [({}, 1.0), ({"rank": 4}, 1.0), ({"rank": 4, "alpha": 6}, 1.5), ({"rank": 4, "rank_pattern": {"x": 2}}, 2.0)],
)
def test_loha_scaling_follows_alpha_and_rank(settings: dict, scaling: float):
    assert LoHaConfig(**settings).wrap("x", Linear(36, 44), seed=0).scaling == pytest.approx(scaling)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank: 0 is out of range"),
        ({"rank": 1.5}, "rank: expected a whole number, got 1.5"),
        ({"alpha": 0}, "alpha: 0 is out of range"),
        ({"alpha_pattern": {"q_proj": -1}}, "alpha: -1 is out of range"),
    ],
)
def test_loha_config_value_out_of_range_raises(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        LoHaConfig(**settings)
