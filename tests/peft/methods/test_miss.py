"""MiSS: formulas of the variants, rank, dropout, layers and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file

from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.peft.layers import LinearAdapter
from paddlenlp_ext.peft.methods.miss import MiSSConfig, fold_features
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.adapters import tiny_model
from tests.golden import DATA
from tests.peft.methods import golden_checks


def random_layer(**settings: object) -> LinearAdapter:
    layer = MiSSConfig(**settings).wrap("x", Linear(12, 8), seed=0)
    generator = np.random.default_rng(0)
    for tensor in (layer.base.weight, layer.miss_block):
        tensor.set_value(generator.standard_normal(tensor.shape).astype(np.float32))
    return layer


@pytest.mark.parametrize("first", [0, 3, 7])
def test_fold_features_adds_up_features_of_equal_remainder(first: int):
    x = np.random.default_rng(0).standard_normal((2, 3, 12)).astype(np.float32)
    expected = np.zeros((2, 3, 5))
    for feature in range(12):
        expected[..., (first + feature) % 5] += x[..., feature]
    np.testing.assert_allclose(fold_features(paddle.to_tensor(x), 5, first).numpy(), expected, atol=1e-6)


def test_balance_delta_weight_adds_one_matrix_to_every_shard():
    layer = random_layer(rank=5)
    shard = layer.miss_block.numpy().T
    np.testing.assert_allclose(layer.delta_weight().numpy(), np.concatenate([shard, shard, shard], 1)[:, :12])


def test_mini_delta_weight_repeats_its_columns_over_the_outputs():
    layer = random_layer(rank=6, variant="mini", mini_rank=4)
    shard = np.concatenate([layer.miss_block.numpy().T] * 2)
    np.testing.assert_allclose(layer.delta_weight().numpy(), np.concatenate([shard, shard], 1))
    assert np.linalg.matrix_rank(layer.delta_weight().numpy()) == 4


def test_bat_delta_weight_maps_each_block_of_the_weight():
    layer = random_layer(rank=4, variant="bat")
    delta, weight, blocks = layer.delta_weight().numpy(), layer.base.weight.numpy(), layer.miss_block.numpy()
    for i in range(2):
        for j in range(3):
            part = np.s_[4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
            np.testing.assert_allclose(delta[part], weight[part] @ blocks[i] + blocks[i], rtol=1e-4, atol=1e-5)
    assert layer.low_rank_factors() is None


def test_miss_dropout_changes_only_the_training_pass():
    layer, x = random_layer(rank=5, dropout=0.5), paddle.ones([1, 12])
    layer.eval()
    exact = layer(x).numpy()
    np.testing.assert_allclose(exact, (layer.base.weight + layer.delta_weight()).sum(1).numpy()[None], rtol=1e-4)
    layer.train()
    outputs = np.concatenate([layer(x).numpy() for _ in range(200)])
    assert np.abs(outputs - exact).max() > 0.5
    np.testing.assert_allclose(outputs.mean(0), exact[0], atol=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank: 0 is out of range"),
        ({"variant": "bta"}, "variant: .*'bat'"),
        ({"init_weights": False}, "variant: expected a string, got False"),
        ({"variant": "bat", "dropout": 0.1}, "miss_dropout=0.1 has no effect"),
        ({"rank": 37}, "miss_rank=37 exceeds the 36 inputs of model.layers.0.self_attn.q_proj"),
        ({"rank": 8, "variant": "bat"}, "miss_rank=8 must divide both the 36 inputs and the 36 outputs of model"),
        ({"variant": "mini", "mini_rank": 8}, "miss_mini_rank=8 does not divide the 36 outputs of model.layers.0"),
    ],
)
def test_miss_option_that_does_not_fit_raises(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        get_peft_model(tiny_model(), MiSSConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "style", "message"),
    [
        (
            {"rank": 5, "variant": "mini", "mini_rank": 8},
            "colwise",
            "each process has 4 outputs .* miss_mini_rank 8",
        ),
        ({"variant": "bat", "rank": 4}, "rowwise", "each process has 6 inputs .* miss_rank 4"),
    ],
)
def test_miss_shard_through_a_block_raises(settings: dict, style: str, message: str):
    layer = random_layer(**settings)
    if style == "colwise":
        layer.base.out_features = 4
    else:
        layer.base.in_features = 6
    with pytest.raises(ValueError, match=message):
        layer.set_tensor_parallel_shard(style, SimpleNamespace(index=1, size=2))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, MiSSConfig(rank=64)),
        ({"r": 4, "init_weights": False, "miss_dropout": 0.1}, MiSSConfig(rank=4, dropout=0.1)),
        ({"r": 4, "init_weights": "bat", "miss_dropout": 0.1}, MiSSConfig(rank=4, variant="bat")),
        ({"r": 4, "init_weights": "mini", "mini_r": 2}, MiSSConfig(rank=4, variant="mini", mini_rank=2)),
    ],
)
def test_miss_from_adapter_config_reads_peft_fields(fields: dict, expected: MiSSConfig):
    config = MiSSConfig.from_adapter_config(fields | {"target_modules": "all-linear"})
    assert config == expected


def test_miss_warm_start_of_bat_ignores_the_dropout_of_the_run():
    run, stored = MiSSConfig(rank=8, dropout=0.1, path="folder"), MiSSConfig(rank=4, variant="bat")
    assert run.warm_start(stored) == MiSSConfig(rank=4, variant="bat", path="folder")
    assert run.warm_start(MiSSConfig(rank=4)) == MiSSConfig(rank=4, dropout=0.1, path="folder")


@pytest.mark.parametrize("case", ["miss_balance", "miss_bat"])
def test_miss_reads_bone_of_older_peft(case: str, tmp_path: Path):
    """Rename a file of MiSS to Bone, whose files and formulas were compared once with those of PEFT 0.17.1."""
    folder = DATA / "adapters" / case
    fields = json.loads((folder / "adapter_config.json").read_text())
    bone = {name: value for name, value in fields.items() if name not in ("mini_r", "miss_dropout")}
    (tmp_path / "adapter_config.json").write_text(json.dumps(bone | {"peft_type": "BONE"}))
    tensors = load_file(folder / "adapter_model.safetensors")
    renamed = {name.replace("miss_block", "bone_block"): value for name, value in tensors.items()}
    save_file(renamed, tmp_path / "adapter_model.safetensors")
    model = PeftModel.from_pretrained(golden_checks.base_model("llama_odd_sizes"), tmp_path)
    golden_checks.close(model(golden_checks.ids_of("llama_odd_sizes")), golden_checks.golden_of(folder)["logits"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"init_weights": "orthogonal"}, 'variant: "orthogonal" is not one of: balance, mini, bat'),
        ({"target_modules": None}, "target_modules is missing"),
    ],
)
def test_miss_peft_file_with_unsupported_field_raises(fields: dict, message: str, tmp_path: Path):
    get_peft_model(tiny_model(), MiSSConfig(rank=4)).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(tiny_model(), tmp_path)
