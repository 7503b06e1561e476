"""OFT: orthogonality of the rotation, block sizes, PEFT's series, rejected files."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.peft.methods.oft import OFTConfig, OFTLinear, cayley_series
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.adapters import tiny_model


def random_layer(**settings: object) -> OFTLinear:
    base = Linear(12, 7)
    generator = np.random.default_rng(0)
    base.weight.set_value(generator.standard_normal([7, 12]).astype(np.float32))
    layer = OFTConfig(**settings).wrap("x", base, seed=0)
    weight = layer.oft_R.weight
    weight.set_value(generator.standard_normal(weight.shape).astype(np.float32))
    return layer


def skew_of(upper: np.ndarray, size: int) -> np.ndarray:
    skew = np.zeros((size, size))
    skew[np.triu_indices(size, 1)] = upper
    return skew - skew.T


def test_rotation_equals_cayley_transform_of_each_block():
    layer = random_layer(block_size=4)
    rotation = layer.rotation().numpy()
    assert rotation.shape == (3, 4, 4)
    for block, upper in zip(rotation, layer.oft_R.weight.numpy(), strict=True):
        skew, eye = skew_of(upper, 4), np.eye(4)
        np.testing.assert_allclose(block, (eye - skew) @ np.linalg.inv(eye + skew), atol=1e-5)
        np.testing.assert_allclose(block @ block.T, eye, atol=1e-5)
        assert np.linalg.det(block) == pytest.approx(1, abs=1e-4)


def test_oft_preserves_norms_and_angles_of_rows():
    layer = random_layer(block_size=6)
    before = layer.base.weight.numpy()
    after = before + layer.delta_weight().numpy()
    np.testing.assert_allclose(after @ after.T, before @ before.T, rtol=1e-4, atol=1e-4)
    assert np.abs(after - before).max() > 0.5


@pytest.mark.parametrize(("terms", "highest"), [(2, 1), (3, 3), (4, 3), (5, 4), (7, 6)])
def test_cayley_series_matches_peft_terms(terms: int, highest: int):
    skew = 0.1 * skew_of(np.random.default_rng(0).standard_normal(10), 5)
    expected = np.eye(5) + 2 * sum(np.linalg.matrix_power(skew, power) for power in range(1, highest + 1))
    expected -= np.linalg.matrix_power(skew, highest) if highest > 1 else 0
    series = cayley_series(paddle.to_tensor(skew[None].astype(np.float32)), terms).numpy()[0]
    np.testing.assert_allclose(series, expected, atol=1e-6)
    transform = (np.eye(5) + skew) @ np.linalg.inv(np.eye(5) - skew)
    assert np.abs(series - transform).max() < 4 * np.linalg.norm(skew, 2) ** min(highest, 6)


@pytest.mark.parametrize(
    ("settings", "in_features", "size"),
    [
        ({}, 64, 32),
        ({}, 36, 36),
        ({}, 44, 22),
        ({}, 8, 8),
        ({"block_size": 5}, 36, 4),
        ({"block_size": 8}, 36, 9),
        ({"num_blocks": 4}, 36, 9),
        ({"num_blocks": 5}, 36, 9),
        ({"num_blocks": 1}, 36, 36),
    ],
)
def test_block_size_of_returns_nearest_divisor(settings: dict, in_features: int, size: int):
    assert OFTConfig(**settings).block_size_of(in_features) == size


def test_oft_other_block_size_than_configured_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logging.getLogger("paddlenlp_ext"), "propagate", True)
    with caplog.at_level(logging.INFO, "paddlenlp_ext"):
        get_peft_model(tiny_model(), OFTConfig())
    assert (
        "oft_block_size 32 does not divide the number of input features of some layers; "
        "block sizes used: 36 for 36 inputs, 22 for 44 inputs"
    ) in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 1}, "block_size: 1 is out of range"),
        ({"num_blocks": 0}, "num_blocks: 0 is out of range"),
        ({"block_size": 8, "num_blocks": 2}, "oft_block_size=8 and oft_num_blocks=2"),
        ({"neumann_terms": 1}, "oft_neumann_terms=1"),
        ({"num_blocks": 36}, "oft_num_blocks=36 gives blocks of a single feature"),
    ],
)
def test_oft_config_value_out_of_range_raises(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        get_peft_model(tiny_model(), OFTConfig(**settings))


def test_block_size_of_prime_inputs_raises():
    with pytest.raises(ValueError, match="oft_block_size=2 gives blocks of a single feature"):
        OFTConfig(block_size=2).wrap("x", Linear(37, 4), seed=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"coft": True}, "unsupported fields: coft=True"),
        ({"use_cayley_neumann": True, "peft_version": "0.17.1"}, "peft_version='0.17.1' with use_cayley_neumann"),
        ({"use_cayley_neumann": True, "peft_version": None}, "peft_version=None with use_cayley_neumann"),
    ],
)
def test_oft_peft_file_with_unsupported_field_raises(fields: dict, message: str, tmp_path: Path):
    get_peft_model(tiny_model(), OFTConfig()).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(tiny_model(), tmp_path)
