"""HiRA: formula, rank of the update, start, dropout, files that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.peft.methods.hira import HiRAConfig, HiRALinear
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.adapters import tiny_model


def random_layer(**settings: object) -> HiRALinear:
    layer = HiRAConfig(**settings).wrap("x", Linear(12, 7), seed=0)
    generator = np.random.default_rng(0)
    for tensor in (layer.base.weight, layer.hira_A, layer.hira_B):
        tensor.set_value(generator.standard_normal(tensor.shape).astype(np.float32))
    return layer


def test_hira_delta_weight_is_the_weight_times_a_low_rank_matrix():
    layer = random_layer(rank=2)
    weight, a, b = layer.base.weight.numpy(), layer.hira_A.numpy(), layer.hira_B.numpy()
    np.testing.assert_allclose(layer.delta_weight().numpy(), weight * (b @ a), rtol=1e-5, atol=1e-5)
    assert np.linalg.matrix_rank(layer.delta_weight().numpy()) == 7
    assert layer.low_rank_factors() is None


def test_hira_update_starts_at_zero_and_trains():
    layer = HiRAConfig(rank=4).wrap("x", Linear(12, 7), seed=0)
    layer.base.weight.set_value(paddle.ones([7, 12]))
    assert not layer.delta_weight().numpy().any() and layer.hira_A.numpy().any()
    layer(paddle.ones([1, 12])).sum().backward()
    assert layer.hira_B.grad.numpy().any()


def test_hira_dropout_acts_on_the_update_in_training_only():
    layer, x = random_layer(rank=2, dropout=0.5), paddle.ones([1, 12])
    layer.eval()
    exact = layer(x).numpy()
    np.testing.assert_allclose(exact, (layer.base.weight + layer.delta_weight()).sum(1).numpy()[None], rtol=1e-4)
    layer.train()
    update = np.concatenate([(layer(x) - layer.base(x)).numpy() for _ in range(400)])
    deviation = update.std(0) / np.sqrt((layer.delta_weight().numpy() ** 2).sum(1))
    np.testing.assert_allclose(deviation, 1, atol=0.15)  # a dropped feature counts 0, another one 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank: 0 is out of range"),
        ({"dropout": 1.0}, "dropout: 1.0 is out of range"),
    ],
)
def test_hira_option_out_of_range_raises(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        HiRAConfig(**settings)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fan_in_fan_out": True}, "unsupported fields: fan_in_fan_out=True"),
    ],
)
def test_hira_peft_file_with_unsupported_field_raises(fields: dict, message: str, tmp_path: Path):
    get_peft_model(tiny_model(), HiRAConfig(rank=4)).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(tiny_model(), tmp_path)
