"""LoKr: sizes of the factors, scale, keys, PaddleNLP's folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.safetensors import write_safetensors
from paddlenlp_ext.config import load_run_config
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.methods.lokr import LoKrConfig, factorize
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.peft.registry import peft_methods
from tests.common.adapters import logits_of, tiny_model, train


@pytest.mark.parametrize(
    ("size", "factor", "parts"),
    [
        (36, -1, (6, 6)),
        (44, -1, (4, 11)),
        (127, -1, (1, 127)),
        (128, -1, (8, 16)),
        (1024, -1, (32, 32)),
        (128, 4, (4, 32)),
        (128, 64, (64, 2)),
        (44, 5, (4, 11)),
        (44, 20, (4, 11)),
        (36, 8, (6, 6)),
        (36, 5, (4, 9)),
    ],
)
def test_factorize_splits_into_nearest_divisors(size: int, factor: int, parts: tuple[int, int]):
    assert factorize(size, factor) == parts


@pytest.mark.parametrize(
    ("settings", "shapes"),
    [
        ({"rank": 8}, {"lokr_w1": [4, 6], "lokr_w2": [11, 6]}),
        ({"rank": 5}, {"lokr_w1": [4, 6], "lokr_w2_a": [11, 5], "lokr_w2_b": [5, 6]}),
        ({"rank": 2, "factor": 2}, {"lokr_w1": [2, 2], "lokr_w2_a": [22, 2], "lokr_w2_b": [2, 18]}),
        (
            {"rank": 2, "decompose_both": True},
            {"lokr_w1_a": [4, 2], "lokr_w1_b": [2, 6], "lokr_w2_a": [11, 2], "lokr_w2_b": [2, 6]},
        ),
        ({"rank": 3, "decompose_both": True}, {"lokr_w1": [4, 6], "lokr_w2_a": [11, 3], "lokr_w2_b": [3, 6]}),
    ],
)
def test_lokr_factors_large_relative_to_rank_are_decomposed(settings: dict, shapes: dict):
    state = LoKrConfig(**settings).wrap("x", Linear(36, 44), seed=0).own_state()
    assert {name: tensor.shape for name, tensor in state.items()} == shapes
    assert {name for name, tensor in state.items() if not tensor.numpy().any()} == {
        "lokr_w1",
        "lokr_w1_a",
    } & shapes.keys()


def test_lokr_update_equals_kronecker_product():
    layer = LoKrConfig(rank=2, alpha=3, decompose_both=True).wrap("x", Linear(36, 44), seed=0)
    generator = np.random.default_rng(0)
    for tensor in layer.own_state().values():
        tensor.set_value(generator.standard_normal(tensor.shape).astype(np.float32))
    own = {name: tensor.numpy() for name, tensor in layer.own_state().items()}
    expected = 1.5 * np.kron(own["lokr_w1_a"] @ own["lokr_w1_b"], own["lokr_w2_a"] @ own["lokr_w2_b"])
    np.testing.assert_allclose(layer.delta_weight().numpy(), expected, rtol=1e-5, atol=1e-5)
    x = generator.standard_normal((3, 5, 36)).astype(np.float32)
    out = layer(paddle.to_tensor(x)).numpy() - layer.base(paddle.to_tensor(x)).numpy()
    np.testing.assert_allclose(out, x @ expected.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "scaling"),
    [
        ({}, 1.0),
        ({"rank": 4}, 1.0),
        ({"rank": 4, "alpha": 0}, 1.0),
        ({"rank": 4, "alpha": 6}, 1.5),
        ({"rank": 4, "alpha": 6, "rank_pattern": {"x": 3}}, 2.0),
    ],
)
def test_lokr_scaling_follows_alpha_and_rank(settings: dict, scaling: float):
    assert LoKrConfig(**settings).wrap("x", Linear(36, 44), seed=0).scaling == pytest.approx(scaling)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank: 0 is out of range"),
        ({"rank": 2.0}, "rank: expected a whole number, got 2.0"),
        ({"alpha": -1.0}, "alpha: -1.0 is out of range"),
        ({"factor": 0}, "lokr_factor=0"),
        ({"factor": -2}, "factor: -2 is out of range"),
        ({"rank_pattern": {"q_proj": 0}}, "rank: 0 is out of range"),
    ],
)
def test_lokr_config_value_out_of_range_raises(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        LoKrConfig(**settings)


@pytest.mark.parametrize("rank_key", ["lokr_rank", "lokr_dim"])
def test_lokr_json_keys_reach_config(rank_key: str, tmp_path: Path):
    run = {
        "model_name_or_path": "m",
        "dataset_name_or_path": "d",
        "output_dir": str(tmp_path / "out"),
        "do_train": True,
    }
    keys = {rank_key: 4, "lokr_alpha": 9, "lokr_factor": 6, "lokr_decompose_both": True, "lokr_path": "start"}
    file = tmp_path / "run.json"
    file.write_text(json.dumps({**run, "lokr": True, "lokr_target_modules": [".*q_proj.*"], **keys}))
    expected = LoKrConfig(rank=4, alpha=9, factor=6, decompose_both=True, path="start", target_modules=(".*q_proj.*",))
    assert load_run_config([str(file)], peft_methods()).peft == expected


def as_paddlenlp(folder: Path, model: PeftModel, **fields: object) -> None:
    """Write the adapter as PaddleNLP does, with its names and copies of alpha; the config stores a scale of 0."""
    config = model.peft_config
    state = model.adapter_state()
    tensors = {f"llama.{name.removeprefix('model.')}": tensor.numpy() for name, tensor in state.items()}
    for name in {name.rpartition(".")[0] for name in tensors}:
        tensors[f"{name}.lokr_alpha"] = np.array(config.rank, np.int64)
    folder.mkdir()
    write_safetensors(folder / "peft_model-00001-of-00001.safetensors", tensors)
    written = {
        "base_model_name_or_path": "somewhere",
        "target_modules": [".*q_proj.*", ".*down_proj.*"],
        "trainable_modules": None,
        "trainable_bias": None,
        "lokr_dim": config.rank,
        "factor": config.factor,
        "decompose_both": config.decompose_both,
        "lokr_alpha": 0.0,
        "merge_weight": False,
        "tensor_parallel_degree": -1,
        "dtype": "float32",
        "scaling": 0.0,
    }
    (folder / "lokr_config.json").write_text(json.dumps({**written, **fields}))


@pytest.mark.parametrize("settings", [{"rank": 8}, {"rank": 2, "decompose_both": True, "factor": 4}])
def test_lokr_paddlenlp_adapter_has_scale_of_its_training(settings: dict, tmp_path: Path):
    """Load an adapter whose config stores a scale of 0, although PaddleNLP trains with 1."""
    model = get_peft_model(tiny_model(), LoKrConfig(**settings, target_modules=["q_proj", "down_proj"]))
    train(model, steps=2)
    as_paddlenlp(tmp_path / "theirs", model)
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path / "theirs")
    assert {layer.scaling for _, layer in adapter_layers(loaded)} == {1.0}
    assert np.array_equal(logits_of(loaded), logits_of(model))
    assert np.abs(logits_of(loaded) - logits_of(tiny_model())).max() > 1e-3


def test_lokr_paddlenlp_alpha_is_read_and_unknown_fields_raise(tmp_path: Path):
    model = get_peft_model(tiny_model(), LoKrConfig(rank=4, alpha=6, target_modules=["q_proj", "down_proj"]))
    train(model, steps=2)
    as_paddlenlp(tmp_path / "theirs", model, lokr_alpha=6.0, scaling=1.5)
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path / "theirs")
    assert np.array_equal(logits_of(loaded), logits_of(model))
    as_paddlenlp(tmp_path / "more", model, trainable_bias="all")
    with pytest.raises(ValueError, match=r"lokr_config\.json: unsupported fields: trainable_bias='all'"):
        PeftModel.from_pretrained(tiny_model(), tmp_path / "more")
