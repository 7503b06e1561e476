"""Randomized SVD of the leading triplets against the full SVD."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.leading_svd import leading_svd
from paddlenlp_ext.peft.methods.olora import OLoRAConfig
from paddlenlp_ext.peft.methods.pissa import PiSSAConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from tests.common.adapters import tiny_model


def matrix(shape: tuple[int, int], falling: bool) -> np.ndarray:
    normal = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return normal * np.arange(1, shape[1] + 1, dtype=np.float32) ** -0.5 if falling else normal


@pytest.mark.parametrize("falling", [False, True])
@pytest.mark.parametrize("shape", [(160, 260), (260, 160)])
def test_leading_svd_residual_is_within_one_percent_of_the_exact_one(shape: tuple[int, int], falling: bool):
    values = matrix(shape, falling)
    u, s, v_t = leading_svd(paddle.to_tensor(values), 16, "w")
    assert [list(part.shape) for part in (u, s, v_t)] == [[shape[0], 16], [16], [16, shape[1]]]
    exact = np.linalg.svd(values, compute_uv=False)
    residual = values - (u.numpy() * s.numpy()) @ v_t.numpy()
    assert np.linalg.norm(residual) <= 1.01 * np.linalg.norm(exact[16:])
    assert np.linalg.norm(residual, 2) <= 1.1 * exact[16]
    np.testing.assert_allclose(u.numpy().T @ u.numpy(), np.eye(16), atol=1e-4)
    np.testing.assert_allclose(v_t.numpy() @ v_t.numpy().T, np.eye(16), atol=1e-4)


def test_leading_svd_of_low_rank_matrix_is_exact():
    left, right = matrix((300, 8), False), matrix((8, 400), False)
    values = left @ right
    u, s, v_t = leading_svd(paddle.to_tensor(values), 8, "w")
    np.testing.assert_allclose((u.numpy() * s.numpy()) @ v_t.numpy(), values, atol=1e-3)


def test_leading_svd_exact_matches_numpy():
    values = matrix((60, 90), False)
    u, s, v_t = leading_svd(paddle.to_tensor(values), 5, "w", exact=True)
    expected_u, expected_s, expected_v = np.linalg.svd(values)
    np.testing.assert_allclose(s.numpy(), expected_s[:5], rtol=1e-5)
    product = (expected_u[:, :5] * expected_s[:5]) @ expected_v[:5]
    np.testing.assert_allclose((u.numpy() * s.numpy()) @ v_t.numpy(), product, atol=1e-3)


def test_leading_svd_repeated_gives_the_same_bits_with_fixed_signs():
    values = paddle.to_tensor(matrix((300, 200), False))
    paddle.seed(1)
    one = leading_svd(values, 6, "w")
    paddle.seed(2)
    other = leading_svd(values, 6, "w")
    assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in zip(one, other, strict=True))
    v_t = one.v_t.numpy()
    assert (v_t[np.arange(6), np.abs(v_t).argmax(axis=1)] > 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("config", [PiSSAConfig(r=2), PiSSAConfig(r=2, svd="exact"), OLoRAConfig(r=2)])
def test_initial_factors_of_a_weight_that_is_not_finite_are_refused(config: PeftConfig, value: float):
    model = tiny_model()
    weight = model.model.layers[1].self_attn.q_proj.weight
    weight.set_value(np.full(weight.shape, value, np.float32))
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj: the matrix to decompose has NaN or infinite"):
        get_peft_model(model, config)
