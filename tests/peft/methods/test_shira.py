"""SHiRA: positions and their number, sharding, files of Windows, damaged and refused files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file

from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.peft.methods.shira import SHiRAConfig, SHiRALinear
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.adapters import logits_of, tiny_model, train


def new_layer(seed: int = 0, name: str = "x", **settings: object) -> SHiRALinear:
    return SHiRAConfig(**settings).wrap(name, Linear(12, 8), seed)


def saved(folder: Path) -> PeftModel:
    """Save a trained adapter."""
    model = get_peft_model(tiny_model(), SHiRAConfig(rank=2))
    train(model)
    model.save_pretrained(folder)
    return model


def change_tensors(folder: Path, change) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({name: change(name, value) for name, value in load_file(file).items()}, file)


def test_shira_has_as_many_values_as_lora_at_distinct_positions():
    layer = new_layer(rank=2)
    rows, columns = layer.shira_indices.numpy()
    assert layer.shira_weight.shape == [2 * (12 + 8)] and len({*zip(rows, columns, strict=True)}) == 40
    assert rows.max() == 7 and columns.max() == 11
    layer.shira_weight.set_value(np.arange(1, 41, dtype=np.float32))
    expected = np.zeros((8, 12))
    expected[rows, columns] = np.arange(1, 41)
    assert np.array_equal(layer.delta_weight().numpy(), expected)


def test_shira_positions_depend_on_layer_and_seed():
    first = new_layer(rank=2).shira_indices.numpy()
    assert not np.array_equal(first, new_layer(rank=2, name="y").shira_indices.numpy())
    assert not np.array_equal(first, new_layer(rank=2, seed=1).shira_indices.numpy())
    assert np.array_equal(first, new_layer(rank=2, seed=1, random_seed=0).shira_indices.numpy())


def test_shira_gradient_is_that_of_the_weight_at_the_positions():
    layer, x = new_layer(rank=2), np.random.default_rng(0).standard_normal((3, 12)).astype(np.float32)
    factors = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)
    (layer(paddle.to_tensor(x)) * paddle.to_tensor(factors)).sum().backward()
    rows, columns = layer.shira_indices.numpy()
    np.testing.assert_allclose(layer.shira_weight.grad.numpy(), (factors.T @ x)[rows, columns], rtol=1e-4, atol=1e-5)


def test_shira_more_values_than_elements_raises():
    with pytest.raises(
        ValueError, match=r"shira_rank=5 selects 100 elements of x, whose weight has only 96 elements; .* at most 4,"
    ):
        new_layer(rank=5)


def test_shira_layer_too_small_for_rank_1_raises():
    with pytest.raises(
        ValueError, match=r"selects 13 elements of x, whose weight has only 12 elements; leave this layer out of"
    ):
        SHiRAConfig(rank=1).wrap("x", Linear(12, 1), 0)


def test_shira_positions_as_float32_are_read(tmp_path: Path):
    model = saved(tmp_path)
    change_tensors(tmp_path, lambda name, value: value.astype(np.float32))
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert np.array_equal(logits_of(loaded), logits_of(model))


@pytest.mark.parametrize("value", [-1, 36])
def test_shira_position_outside_of_the_weight_raises(value: int, tmp_path: Path):
    saved(tmp_path)
    name = "base_model.model.model.layers.1.self_attn.q_proj.shira_indices"

    def change(own: str, tensor: np.ndarray) -> np.ndarray:
        if own == name:
            tensor[1, 3] = value
        return tensor

    change_tensors(tmp_path, change)
    with pytest.raises(ValueError, match=r"q_proj.shira_indices has positions outside the weight \[36, 36\]"):
        PeftModel.from_pretrained(tiny_model(), tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fan_in_fan_out": True}, "unsupported fields: fan_in_fan_out=True"),
    ],
)
def test_shira_peft_file_with_unsupported_field_raises(fields: dict, message: str, tmp_path: Path):
    saved(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(tiny_model(), tmp_path)
