"""Test AutoModelForCausalLM: seeds, saving and loading, parameter formats."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file

from paddlenlp_ext import AutoModelForCausalLM
from tests.golden.cases.model_cases import CASES
from tests.models.tiny_model import TINY, make_model

EXPERTS_OR_LATENTS = {
    settings["model_type"]: settings
    for settings in CASES.values()
    if settings.keys() & {"num_experts_per_tok", "moe_k"} or settings["model_type"] == "minicpm3"
}
"""A tiny model of each family with experts or latent attention."""


def values(model) -> dict[str, np.ndarray]:
    return {name: parameter.numpy() for name, parameter in model.named_parameters()}


def test_from_config_same_seed_gives_same_weights():
    first, again, other = make_model(seed=3), make_model(seed=3), make_model(seed=4)
    for name, array in values(first).items():
        np.testing.assert_array_equal(array, values(again)[name])
        assert array.ndim == 1 or not np.array_equal(array, values(other)[name])
    matrix = values(first)["model.layers.0.mlp.up_proj.weight"]
    assert matrix.std() == pytest.approx(0.2, rel=0.1) and abs(matrix.mean()) < 0.02
    assert not np.array_equal(matrix, values(first)["model.layers.1.mlp.up_proj.weight"])
    assert (values(first)["model.norm.weight"] == 1).all()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_save_pretrained_reloads_bit_for_bit(tmp_path: Path, tied: bool, model_type: str):
    changes = {"tie_word_embeddings": tied, "model_type": model_type, "head_dim": 8, "own_key": [1, 2]}
    model = make_model(**changes)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not loaded.training and loaded.config.name_or_path == str(tmp_path)
    assert values(loaded).keys() == values(model).keys()
    for name, array in values(model).items():
        np.testing.assert_array_equal(values(loaded)[name], array)

    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == values(model).keys() and ("lm_head.weight" in stored) != tied
    config = json.loads((tmp_path / "config.json").read_text())
    architecture = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[model_type]
    assert config == {**TINY, **changes, "architectures": [architecture], "torch_dtype": "float32"}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"model_type": "mixtral"}, ("block_sparse_moe.gate.weight", "block_sparse_moe.experts.7.w2.weight")),
        (
            {"model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_intermediate_size": 12},
            ("mlp.moe_statics.e_score_correction_bias", "mlp.experts.7.up_proj.weight", "mlp.gate.weight"),
        ),
    ],
)
def test_save_pretrained_of_experts_writes_hub_names_and_reloads_bit_for_bit(tmp_path: Path, changes, names):
    model = make_model(**changes)
    model.save_pretrained(tmp_path, max_shard_bytes=50_000)
    stored = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert {f"model.layers.1.{name}" for name in names} <= stored.keys() and len(set(stored.values())) > 2
    assert not any("gate_up_proj" in name for name in stored)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, array in values(model).items():
        np.testing.assert_array_equal(values(loaded)[name], array)


@pytest.mark.parametrize("model_type", EXPERTS_OR_LATENTS)
def test_save_pretrained_of_experts_and_latents_in_shards_reloads_bit_for_bit(tmp_path: Path, model_type: str):
    model = AutoModelForCausalLM.from_config({**EXPERTS_OR_LATENTS[model_type], "initializer_range": 0.2})
    model.save_pretrained(tmp_path, max_shard_bytes=15_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = values(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert loaded.keys() == values(model).keys()
    assert all(np.array_equal(loaded[name], array) for name, array in values(model).items())


@pytest.mark.parametrize(
    "given", [{}, {"torch_dtype": "float16"}, {"dtype": "float16"}, {"dtype": "float16", "torch_dtype": "bfloat16"}]
)
def test_save_pretrained_writes_dtype_once_under_config_key(tmp_path: Path, given: dict[str, str]):
    """Check that one key exists: with both, transformers would prefer `dtype` and round the trained weights."""
    make_model(**given).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    key = "dtype" if "dtype" in given else "torch_dtype"
    assert {name: config[name] for name in ("dtype", "torch_dtype") if name in config} == {key: "float32"}


def test_from_config_keeps_name_or_path():
    assert make_model().config.name_or_path is None
    assert AutoModelForCausalLM.from_config(TINY, name_or_path="some/name").config.name_or_path == "some/name"


def test_from_pretrained_shards_equal_one_file(tmp_path: Path):
    model = make_model()
    model.save_pretrained(tmp_path, max_shard_bytes=20_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, array in values(model).items():
        np.testing.assert_array_equal(values(loaded)[name], array)


def test_load_weights_restores_saved_values(tmp_path: Path):
    model, other = make_model(seed=1), make_model(seed=2)
    model.save_pretrained(tmp_path)
    other.load_weights(tmp_path)
    np.testing.assert_array_equal(values(other)["lm_head.weight"], values(model)["lm_head.weight"])
    with pytest.raises(ValueError, match="misshapen"):
        make_model(vocab_size=95).load_weights(tmp_path)


def test_from_pretrained_creates_parameters_in_dtype(tmp_path: Path):
    make_model().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="bfloat16")
    assert {p.dtype for p in model.parameters() if p.ndim == 2} == {paddle.bfloat16}
    assert {p.dtype for p in model.parameters() if p.ndim == 1} == {paddle.float32}, "norms and biases, on the CPU"
    assert paddle.get_default_dtype() == "float32"
    model.save_pretrained(tmp_path / "half")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    with pytest.raises(ValueError, match=r"dtype float16: .* on the device cpu; use bfloat16"):
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float16")
    with pytest.raises(ValueError, match=r"dtype 'int8'.*float32, bfloat16, float16"):
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype="int8")


def test_use_flash_attention_false_on_gpu_selects_plain_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_model().save_pretrained(tmp_path)
    for device, asked_for in (("gpu:0", "blocks"), ("cpu", None)):
        monkeypatch.setattr(paddle, "get_device", lambda device=device: device)
        declined = AutoModelForCausalLM.from_pretrained(tmp_path, use_flash_attention=False)
        assert {layer.self_attn.implementation for layer in declined.model.layers} == {asked_for}
    assert AutoModelForCausalLM.from_pretrained(tmp_path).model.layers[0].self_attn.implementation is None
