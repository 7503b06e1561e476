"""HRA: the compact form of the chain of reflections, its start, its ranks; numbers of PEFT are in the golden tests."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.peft.lora_conversion import save_as_lora
from paddlenlp_ext.peft.methods.hra import HRAConfig, HRALinear
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.adapters import logits_of, tiny_model, train


def random_layer(rank: int, gram_schmidt: bool = False) -> HRALinear:
    generator = np.random.default_rng(rank)
    base = Linear(12, 7, bias=True)
    for parameter in base.parameters():
        parameter.set_value(generator.standard_normal(parameter.shape).astype(np.float32))
    layer = HRAConfig(rank=rank, gram_schmidt=gram_schmidt).wrap("x", base, seed=0)
    layer.hra_u.set_value(generator.standard_normal([12, rank]).astype(np.float32))
    return layer


def chain(u: np.ndarray, gram_schmidt: bool) -> np.ndarray:
    """Return H [in, in], one reflection after the other."""
    u = np.linalg.qr(u.astype(np.float64))[0] if gram_schmidt else u / np.linalg.norm(u, axis=0)
    product = np.eye(len(u))
    for column in u.T:
        product = product @ (np.eye(len(u)) - 2 * np.outer(column, column))
    return product


@pytest.mark.parametrize("gram_schmidt", [False, True])
@pytest.mark.parametrize("rank", [1, 4, 5, 8])
def test_hra_equals_product_of_reflections(rank: int, gram_schmidt: bool):
    layer = random_layer(rank, gram_schmidt)
    reflected = layer.base.weight.numpy() @ chain(layer.hra_u.numpy(), gram_schmidt)
    x = np.random.default_rng(0).standard_normal((2, 3, 12)).astype(np.float32)
    np.testing.assert_allclose(
        layer(paddle.to_tensor(x)).numpy(), x @ reflected.T + layer.base.bias.numpy(), rtol=1e-4, atol=2e-5
    )
    np.testing.assert_allclose(layer.merged_weight().numpy(), reflected, rtol=1e-4, atol=2e-5)
    gram = reflected @ reflected.T
    np.testing.assert_allclose(gram, layer.base.weight.numpy() @ layer.base.weight.numpy().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gram_schmidt", [False, True])
def test_hra_gradient_equals_central_differences(gram_schmidt: bool):
    layer = random_layer(3, gram_schmidt)
    generator = np.random.default_rng(1)
    x, weights = generator.standard_normal((5, 12)), generator.standard_normal((5, 7))
    (layer(paddle.to_tensor(x.astype(np.float32))) * paddle.to_tensor(weights.astype(np.float32))).sum().backward()
    u, base = layer.hra_u.numpy().astype(np.float64), layer.base.weight.numpy().astype(np.float64)

    def loss(at: np.ndarray) -> float:
        return float(((x @ chain(at, gram_schmidt).T @ base.T) * weights).sum())

    expected = np.zeros_like(u)
    for index in np.ndindex(*u.shape):
        step = np.zeros_like(u)
        step[index] = 1e-5
        expected[index] = (loss(u + step) - loss(u - step)) / 2e-5
    np.testing.assert_allclose(layer.hra_u.grad.numpy(), expected, rtol=1e-3, atol=1e-3)


def test_hra_starts_as_base_with_even_rank_only():
    base = logits_of(tiny_model())
    for rank, starts_as_base in ((2, True), (6, True), (3, False)):
        model = get_peft_model(tiny_model(), HRAConfig(rank=rank))
        assert np.allclose(logits_of(model), base, atol=1e-5) == starts_as_base


def test_hra_more_orthogonal_vectors_than_inputs_raises():
    with pytest.raises(ValueError, match=r"hra_rank=37 .*: a layer with 36 inputs has at most 36 orthogonal"):
        get_peft_model(tiny_model(), HRAConfig(rank=37, gram_schmidt=True))


def test_hra_saved_as_lora_keeps_logits(tmp_path):
    model = get_peft_model(tiny_model(), HRAConfig(rank=4))
    train(model, steps=3)
    save_as_lora(model, tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert loaded.peft_config.peft_type == "LORA" and loaded.peft_config.rank == 4
    np.testing.assert_allclose(logits_of(loaded), logits_of(model), atol=1e-5)
    assert np.abs(logits_of(model) - logits_of(tiny_model())).max() > 1e-3
