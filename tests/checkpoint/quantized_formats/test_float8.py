"""Weights in FP8: values against transformers (tests/golden/generators/make_float8_golden.py), shards, errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.checkpoint.dtypes import cast
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.safetensors import LazyTensor, save_sharded
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.sharding_spec import Shard
from tests.golden import DATA

GOLDEN = dict(np.load(DATA / "float8.npz"))
NAME = "model.layers.0.self_attn.o_proj.weight"


def write(folder: Path, tensors: dict[str, tuple[str, np.ndarray]], **options) -> Path:
    """Write a folder of tensors (format, values) with these options of the quantization."""
    lazy = {name: LazyTensor(values.shape, dtype, lambda v=values: v) for name, (dtype, values) in tensors.items()}
    save_sharded(folder, lazy)
    config = {"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8", **options}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def codes_of(case: str) -> np.ndarray:
    return GOLDEN[f"{case}/codes"]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e8m0fnu"])
def test_cast_of_float8_has_the_values_of_pytorch(dtype):
    np.testing.assert_array_equal(cast(np.arange(256, dtype=np.uint8), dtype, "float32"), GOLDEN[dtype])


@pytest.mark.parametrize("case", ["odd", "small_blocks"])
def test_open_weights_of_float8_gives_the_values_of_transformers(case, tmp_path):
    codes, scales = codes_of(case), GOLDEN[f"{case}/scales"]
    stored = {NAME: ("float8_e4m3fn", codes), f"{NAME}_scale_inv": ("float32", scales)}
    stored |= {"model.norm.weight": ("float32", scales[0]), "x.activation_scale": ("float32", np.float32([2]))}
    weights = open_weights(write(tmp_path, stored, weight_block_size=GOLDEN[f"{case}/block"].tolist()))
    assert sorted(weights.names()) == [NAME, "model.norm.weight"]
    assert weights.shape(NAME) == codes.shape and weights.dtype(NAME) == "bfloat16"
    expected = GOLDEN[f"{case}/float32"]
    np.testing.assert_array_equal(weights.read(NAME, "float32"), expected)
    np.testing.assert_array_equal(weights.read(NAME), GOLDEN[f"{case}/bfloat16"].view(np.uint16))
    for axis, size in enumerate(codes.shape):
        shard = Shard(axis, size // 3, size - 1, size)
        np.testing.assert_array_equal(weights.read(NAME, "float32", shard), expected[shard.index])


@pytest.mark.parametrize(("ending", "shape"), [("_scale_inv", ()), ("_scale", (1,))])
def test_open_weights_of_float8_with_one_scale_multiplies_the_full_matrix(ending, shape, tmp_path):
    codes, scale = codes_of("odd"), np.full(shape, 0.375, np.float32)
    stored = {NAME: ("float8_e4m3fn", codes), NAME + ending: ("float32", scale)}
    weights = open_weights(write(tmp_path, stored, weight_block_size=None))
    assert weights.names() == [NAME]
    np.testing.assert_array_equal(weights.read(NAME, "float32"), cast(codes, "float8_e4m3fn", "float32") * 0.375)


@pytest.mark.parametrize("case", ["odd", "small_blocks"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_open_weights_of_float8_with_stacked_experts_multiplies_each_expert_by_its_scales(case, is_whole, tmp_path):
    name, factors = "model.layers.0.mlp.experts.gate_up_proj", np.float32([0.5, 2, 8]).reshape(3, 1, 1)
    codes, scales = codes_of(case), np.ones((1, 1), np.float32) if is_whole else GOLDEN[f"{case}/scales"]
    stored = {name: ("float8_e4m3fn", np.stack([codes] * 3)), f"{name}_scale_inv": ("float32", factors * scales)}
    stored[f"{name}_activation_scale"] = ("float32", np.ones(3, np.float32))
    block = None if is_whole else GOLDEN[f"{case}/block"].tolist()
    weights = open_weights(write(tmp_path, stored, weight_block_size=block))
    assert weights.names() == [name]
    expected = factors * (cast(codes, "float8_e4m3fn", "float32") if is_whole else GOLDEN[f"{case}/float32"])
    np.testing.assert_array_equal(weights.read(name, "float32"), expected)
    for axis, size in enumerate(expected.shape):
        shard = Shard(axis, size // 3, size - 1, size)
        np.testing.assert_array_equal(weights.read(name, "float32", shard), expected[shard.index])


def test_open_weights_of_float8_with_one_scale_for_all_experts_raises(tmp_path):
    name = "model.layers.0.mlp.experts.down_proj"
    stored = {
        name: ("float8_e4m3fn", codes_of("small_blocks")[None]),
        f"{name}_scale_inv": ("float32", np.ones(1, np.float32)),
    }
    with pytest.raises(ValueError, match=r"the shape \[1\] for a weight of \[1, 7, 11\]; expected: \[1, 1, 1\] for bl"):
        open_weights(write(tmp_path, stored, weight_block_size=None))


def test_open_weights_of_float8_reads_scales_that_are_powers_of_2(tmp_path):
    codes, scales = codes_of("small_blocks"), np.full((4, 4), 129, np.uint8)
    stored = {NAME: ("float8_e4m3fn", codes), f"{NAME}_scale_inv": ("float8_e8m0fnu", scales)}
    weights = open_weights(write(tmp_path, stored, weight_block_size=[2, 3]))
    np.testing.assert_array_equal(weights.read(NAME, "float32"), 4 * cast(codes, "float8_e4m3fn", "float32"))


@pytest.mark.parametrize(
    ("scales", "block", "message"),
    [
        (None, [2, 3], f"{NAME} is stored in FP8, but {NAME}_scale_inv is missing"),
        ((4, 3), [2, 3], r"_scale_inv has the shape \[4, 3\] for a weight of \[7, 11\]; expected: \[4, 4\] for blocks"),
        ((4, 4), None, r"has the shape \[4, 4\] for a weight of \[7, 11\]; expected: 1 element"),
        ((4, 4), [2, 0], r"weight_block_size \[2, 0\] in quantization_config of config.json must be null or two"),
    ],
)
def test_open_weights_of_float8_with_other_scales_raises(scales, block, message, tmp_path):
    stored = {NAME: ("float8_e4m3fn", codes_of("small_blocks"))}
    if scales is not None:
        stored[f"{NAME}_scale_inv"] = ("float32", np.ones(scales, np.float32))
    with pytest.raises(ValueError, match=message):
        open_weights(write(tmp_path, stored, weight_block_size=block))


@paddle.no_grad()
def test_from_pretrained_of_a_model_in_float8_has_the_logits_of_transformers(tmp_path):
    golden, folder = dict(np.load(DATA / "float8_model" / "golden.npz")), DATA / "float8_model"
    model, ids = AutoModelForCausalLM.from_pretrained(folder), paddle.to_tensor(golden["input_ids"])
    expected = golden["logits"]
    np.testing.assert_allclose(model(ids).numpy(), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in read_model_config(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    np.testing.assert_array_equal(again(ids).numpy(), model(ids).numpy())
    quantized = AutoModelForCausalLM.from_pretrained(folder, quantization_config=QuantizationConfig(algo="nf4"))
    assert np.isfinite(quantized(ids).numpy()).all()
