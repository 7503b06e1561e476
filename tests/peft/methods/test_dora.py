"""DoRA: properties that the conformance suite and PEFT's golden files do not cover."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.load_weighted_sum import load_combined
from paddlenlp_ext.peft.methods.dora import DoRAConfig, DoRALinear
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.adapters import logits_of, loss_of, tiny_model, train


def adapted(**options: object) -> PeftModel:
    model = get_peft_model(tiny_model(), DoRAConfig(**{"rank": 4, **options}))
    model.eval()
    return model


def first_layer(model: PeftModel) -> DoRALinear:
    return next(adapter_layers(model.base_model))[1]


def test_dora_start_equals_base_bitwise():
    assert np.array_equal(logits_of(adapted()), logits_of(tiny_model()))


def test_direction_norms_equal_norms_of_updated_rows():
    model = adapted(alpha=9.0)
    train(model, steps=3)
    for _, layer in adapter_layers(model.base_model):
        b, a = layer.lora_B.weight.numpy(), layer.lora_A.weight.numpy()
        directed = layer.base.weight.numpy() + layer.scaling * b @ a
        np.testing.assert_allclose(layer.direction_norms().numpy(), np.linalg.norm(directed, axis=1), rtol=1e-5)


def test_dora_gradient_treats_norms_as_constants():
    """Compare with dL/dB = s g^T (x A^T), g = (m / c) dL/dy, which has no term of dc/dB."""
    model = adapted()
    train(model, steps=2)
    layer = first_layer(model)
    x, upstream = (np.random.default_rng(i).standard_normal((7, 36)).astype(np.float32) for i in range(2))
    (layer(paddle.to_tensor(x)) * paddle.to_tensor(upstream)).sum().backward()
    stretch = layer.lora_magnitude_vector.numpy() / layer.direction_norms().numpy()
    expected = layer.scaling * (upstream * stretch).T @ (x @ layer.lora_A.weight.numpy().T)
    np.testing.assert_allclose(layer.lora_B.weight.grad.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_dora_dropout_leaves_base_input_unchanged():
    """Drop all of the adapter's input: the output is that of the base, without DoRA's scaling of magnitudes."""
    model = adapted(dropout=0.999999)
    train(model, steps=2)
    layer = first_layer(model)
    x = paddle.to_tensor(np.random.default_rng(0).standard_normal((7, 36)).astype(np.float32))
    layer.train()
    assert np.array_equal(layer(x).numpy(), layer.base(x).numpy())


def test_dora_training_lowers_loss():
    model = adapted()
    before = float(loss_of(model))
    train(model, steps=15)
    assert float(loss_of(model)) < 0.8 * before
    assert not np.allclose(
        first_layer(model).lora_magnitude_vector.numpy(), first_layer(adapted()).base_squared_norms ** 0.5
    )


def test_dora_save_as_lora_raises(tmp_path: Path):
    model = adapted()
    train(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"LORA \(DoRAConfig\) is not a low-rank change"):
        load_combined(tiny_model(), {tmp_path: 1.0})


def test_lora_path_of_dora_adapter_raises(tmp_path: Path):
    adapted().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"contains an adapter of type LORA \(DoRAConfig\)"):
        get_peft_model(tiny_model(), LoRAConfig(path=str(tmp_path)))
