"""BOFT: rotation against its definition by permutation matrices, block sizes, dropout of blocks, refused layers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.peft.methods.boft import BOFTConfig, BOFTLinear
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.adapters import tiny_model


def random_layer(**settings: object) -> BOFTLinear:
    layer = BOFTConfig(**settings).wrap("x", Linear(48, 7), seed=0)
    generator = np.random.default_rng(0)
    for tensor in (layer.base.weight, layer.boft_R, layer.boft_s):
        tensor.set_value(generator.standard_normal(tensor.shape).astype(np.float32))
    return layer


def rotation_of(layer: BOFTLinear) -> np.ndarray:
    """Return R, from permutation matrices P_i whose rows collect every second half block of 2^i blocks."""
    parameters, size = layer.boft_R.numpy().astype(np.float64), layer.block_size
    total = np.eye(48)
    for factor, blocks in enumerate(parameters):
        diagonal = np.zeros((48, 48))
        for k, block in enumerate(blocks):
            skew, eye = (block - block.T) / 2, np.eye(size)
            part = slice(k * size, (k + 1) * size)
            diagonal[part, part] = (eye - skew) @ np.linalg.inv(eye + skew)
        order = []
        for start in range(0, 48, size * 2**factor):
            halves = np.split(np.arange(start, start + size * 2**factor), 2 ** (factor + 1)) if size > 1 else []
            order += [feature for half in [*halves[::2], *halves[1::2]] for feature in half]
        permutation = np.eye(48)[order]
        total = permutation @ diagonal @ permutation.T @ total
    return total


@pytest.mark.parametrize("settings", [{"block_size": 2, "butterfly_factors": 4}, {"num_blocks": 12}])
def test_boft_delta_weight_matches_permutation_matrices(settings: dict):
    layer = random_layer(**settings)
    rotation, weight, scale = rotation_of(layer), layer.base.weight.numpy(), layer.boft_s.numpy()
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(48), atol=1e-8)
    expected = scale * (weight @ rotation.T) - weight
    np.testing.assert_allclose(layer.delta_weight().numpy(), expected, atol=1e-4)


def test_boft_factors_connect_features_of_several_blocks():
    """Four factors of block size 2 connect the features of 8 blocks, one factor those of one block."""
    for factors, connected in ((1, 2), (2, 4), (4, 16)):
        rotation = rotation_of(random_layer(block_size=2, butterfly_factors=factors))
        assert (np.abs(rotation) > 1e-9).sum(1).max() == connected


@pytest.mark.parametrize(("style", "size"), [(None, 1), ("rowwise", 2)])
def test_boft_dropout_makes_blocks_of_one_factor_the_identity(style: str | None, size: int):
    layer = random_layer(block_size=4, butterfly_factors=2, dropout=0.5)
    layer.train()
    if style:
        layer.style, layer.shard_group = style, SimpleNamespace(index=1, size=size)
    exact, counts, factors = layer.rotations(), [], set()
    for _ in range(40):
        blocks = layer._drop_blocks(exact).numpy()
        dropped = (blocks == np.eye(4)).all((2, 3))
        np.testing.assert_array_equal(blocks[~dropped], exact.numpy()[~dropped])
        factors |= {*np.flatnonzero(dropped.any(1)).tolist()}
        counts.append(dropped.sum(1).max())
        assert dropped.any(1).sum() == 1
    assert factors == {0, 1}
    assert set(counts) == {6} if size == 1 else np.mean(counts) == pytest.approx(6, abs=1)
    layer.eval()
    assert layer._drop_blocks(exact) is exact


def test_boft_weight_decay_spares_the_scales():
    config = BOFTConfig()
    assert config.decays("model.layers.0.mlp.up_proj.boft_R") and not config.decays("model.layers.0.mlp.up_proj.boft_s")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 1}, "boft_block_size=1 gives blocks of a single feature in model.layers.0"),
        ({"block_size": 8, "num_blocks": 2}, "boft_block_size=8 and boft_num_blocks=2"),
        ({"block_size": 5}, "boft_block_size=5 does not divide the 36 inputs of model.layers.0.self_attn.q_proj"),
        ({"num_blocks": 36}, "boft_num_blocks=36 gives blocks of a single feature in model.layers.0"),
        (
            {"num_blocks": 4, "butterfly_factors": 2},
            r"even block size b, .*=36 .* multiple of 2 \* b, but b is 9;",
        ),
        (
            {"butterfly_factors": 3},
            r"boft_butterfly_factors=3 requires an even .*=36 .* multiple of 4 \* b, but b is 4;",
        ),
    ],
)
def test_boft_option_that_does_not_fit_raises(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        get_peft_model(tiny_model(), BOFTConfig(**settings))


def test_boft_shard_through_a_group_of_blocks_raises():
    layer = random_layer(block_size=4, butterfly_factors=3)
    layer.base.in_features = 24
    with pytest.raises(
        ValueError, match=r"each process has 24 inputs of a layer, which is not a multiple of .* mix, 16; lower"
    ):
        layer.set_tensor_parallel_shard("rowwise", SimpleNamespace(index=0, size=2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fan_in_fan_out": True}, "unsupported fields: fan_in_fan_out=True"),
    ],
)
def test_boft_peft_file_with_unsupported_field_raises(fields: dict, message: str, tmp_path: Path):
    get_peft_model(tiny_model(), BOFTConfig()).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(tiny_model(), tmp_path)


def test_boft_bias_is_not_scaled():
    layer = BOFTConfig().wrap("x", Linear(8, 3, bias=True), seed=0)
    layer.base.bias.set_value(paddle.to_tensor([1.0, 2.0, 3.0]))
    layer.boft_s.set_value(paddle.full([3, 1], 5.0))
    assert layer(paddle.zeros([1, 8])).tolist() == [[1.0, 2.0, 3.0]]
