"""FP8 and int8 models of compressed-tensors, against its formulas and the logits of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext import AutoModelForCausalLM
from paddlenlp_ext.checkpoint.dtypes import cast
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.safetensors import LazyTensor, save_sharded
from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.quantization.checkpoint_tensors import read_stored, stored_layers
from paddlenlp_ext.quantization.config_json import from_quantization_config
from paddlenlp_ext.quantization.quantize_model import quantized_layers
from paddlenlp_ext.sharding_spec import Shard
from tests.golden import DATA

OUT, IN = 5, 12
DYNAMIC = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
CASES = sorted(path.name for path in (DATA / "compressed_model").iterdir())
RNG = np.random.default_rng(0)
FP8_CODES = RNG.integers(0, 127, (OUT, IN)).astype(np.uint8)
INT8_CODES = RNG.integers(-128, 128, (OUT, IN)).astype(np.int8)


def options(kind: str, form: str, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True, **weights},
        "input_activations": {**DYNAMIC, "type": kind},
    }
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


FP8 = options("float", "float-quantized")
W8A8 = options("int", "int-quantized")


def write(folder: Path, quantization: dict[str, Any], tensors: dict[str, tuple[str, np.ndarray]]) -> Path:
    """Write a folder with tensors: name -> dtype and values."""
    lazy = {name: LazyTensor(values.shape, dtype, lambda v=values: v) for name, (dtype, values) in tensors.items()}
    save_sharded(folder, lazy)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quantization}))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_model_of_compressed_tensors_has_the_logits_of_transformers(case: str):
    folder = DATA / "compressed_model" / case
    golden, model = np.load(folder / "golden.npz"), AutoModelForCausalLM.from_pretrained(folder)
    assert len(quantized_layers(model)) == (0 if case.startswith("fp8") else 7)
    with paddle.no_grad():
        logits = model(paddle.to_tensor(golden["input_ids"])).numpy()
    np.testing.assert_allclose(logits, golden["logits"], atol=2e-5)


@pytest.mark.parametrize(
    ("strategy", "shape"),
    [
        ({"strategy": "channel"}, (OUT, 1)),
        ({"strategy": "tensor"}, (1,)),
        ({"strategy": "group", "group_size": 4}, (OUT, 3)),
        ({"strategy": "block", "block_structure": [2, 8]}, (3, 2)),
    ],
)
def test_fp8_weights_are_codes_times_the_scales_of_their_strategy(tmp_path: Path, strategy: dict[str, Any], shape):
    scales = np.abs(RNG.standard_normal(shape)).astype(np.float32)
    tensors = {
        "a.weight": ("float8_e4m3fn", FP8_CODES),
        "a.weight_scale": ("float32", scales),
        "a.input_scale": ("float32", np.float32([2])),
        "model.norm.weight": ("float32", np.float32([1])),
    }
    weights = open_weights(write(tmp_path, options("float", "float-quantized", **strategy), tensors))
    assert sorted(weights.names()) == ["a.weight", "model.norm.weight"] and weights.dtype("a.weight") == "float32"
    grid = scales.reshape(-1, 1) if scales.ndim < 2 else scales
    rows, columns = {1: OUT, 3: 2, OUT: 1}[len(grid)], {1: IN, 2: 8, 3: 4}[grid.shape[1]]
    full = grid.repeat(rows, axis=0)[:OUT].repeat(columns, axis=1)[:, :IN]
    expected = cast(FP8_CODES, "float8_e4m3fn", "float32") * full
    np.testing.assert_array_equal(weights.read("a.weight"), expected)
    for axis, size in enumerate(expected.shape):
        shard = Shard(axis, 1, size - 1, size)
        np.testing.assert_array_equal(weights.read("a.weight", None, shard), expected[shard.index])


@pytest.mark.parametrize("zeros", [None, RNG.integers(-128, 128, (OUT, 1)).astype(np.int8)], ids=["symmetric", "zeros"])
def test_int8_weights_are_codes_minus_zero_points_times_scales(tmp_path: Path, zeros: np.ndarray | None):
    scales = np.abs(RNG.standard_normal((OUT, 1))).astype(np.float32)
    tensors = {"a.weight": ("int8", INT8_CODES), "a.weight_scale": ("float32", scales)}
    if zeros is not None:
        tensors["a.weight_zero_point"] = ("int8", zeros)
    source = open_weights(write(tmp_path, options("int", "int-quantized", symmetric=zeros is None), tensors))
    weight = read_stored("a", stored_layers(source)["a"], source)
    shift = 0 if zeros is None else zeros.astype(np.float32)
    expected = (INT8_CODES.astype(np.float32) - shift) * scales
    np.testing.assert_allclose(dequantize(weight).numpy(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({**FP8, "format": "nvfp4-pack-quantized"}, "floating-point weights of 8 bits in the format 'nvfp4-pack-"),
        (options("float", "float-quantized", num_bits=4), "floating-point weights of 4 bits"),
        (options("float", "float-quantized", strategy="tensor_group"), "FP8 weights and the strategy 'tensor_group'"),
        ({**FP8, "transform_config": {"config_groups": {"R1": {}}}}, "with a transform_config is not supported"),
        (options("float", "float-quantized", strategy="group", group_size=0), "group_size .* must be"),
    ],
)
def test_fp8_weights_of_an_unsupported_variant_raise(tmp_path: Path, changed: dict[str, Any], message: str):
    tensors = {"a.weight": ("float8_e4m3fn", FP8_CODES), "a.weight_scale": ("float32", np.ones((OUT, 1), np.float32))}
    with pytest.raises(ValueError, match=message):
        open_weights(write(tmp_path, changed, tensors))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({**W8A8, "sparsity_config": {"format": "sparse-24-bitmask"}}, "with a sparsity_config is not supported"),
        ({**W8A8, "config_groups": {**W8A8["config_groups"], "group_1": {}}}, "with 2 groups of layers"),
        ({**W8A8, "config_groups": [1]}, r"config_groups is \[1\], not an object"),
        (options("int", "marlin-24"), "weights of type 'int' in the format 'marlin-24'"),
    ],
)
def test_int8_weights_of_an_unsupported_variant_raise(changed: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        from_quantization_config(changed)


def test_int8_weights_that_are_stored_as_floats_or_missing_raise(tmp_path: Path):
    scale = ("float32", np.ones((OUT, 1), np.float32))
    floats = {"a.weight": ("float32", np.ones((OUT, IN), np.float32)), "a.weight_scale": scale}
    source = open_weights(write(tmp_path / "floats", W8A8, floats))
    with pytest.raises(ValueError, match=r"a\.weight is float32, not int8; download or save the model again"):
        source.read("a.weight")
    with pytest.raises(ValueError, match=r"a\.weight is missing; download or save the model again"):
        open_weights(write(tmp_path / "missing", W8A8, {"a.weight_scale": scale}))
