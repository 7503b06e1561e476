"""Test files of GPTQ, AWQ and compressed-tensors against the formulas of their layouts, and against transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext import AutoModelForCausalLM
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.quantized_formats.packed_layout import IntegerMatrix, PackedLayout
from paddlenlp_ext.checkpoint.quantized_formats.registry import read_layout
from paddlenlp_ext.checkpoint.quantized_formats.repack import PackedWeights, pack_tensors
from paddlenlp_ext.checkpoint.safetensors import SafetensorsFile, as_lazy
from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.quantization.checkpoint_tensors import read_stored, stored_layers
from paddlenlp_ext.quantization.config_json import from_quantization_config
from paddlenlp_ext.quantization.ptq.integer_format import IntegerFormat
from paddlenlp_ext.quantization.ptq.rtn import round_to_nearest
from paddlenlp_ext.quantization.quantize_model import quantized_layers
from tests.common.golden import ArrayWeights
from tests.golden import DATA

OUT, IN, GROUP = 16, 32, 8
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
}
IN_8_BITS = {**COMPRESSED, "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**WEIGHTS, "num_bits": 8}}}}
LAYOUTS = [GPTQ, {**GPTQ, "bits": 8}, AWQ, COMPRESSED, IN_8_BITS]
CASES = sorted(path.name for path in (DATA / "packed_model").iterdir())


def layout_of(options: dict[str, Any]) -> PackedLayout:
    layout = read_layout(options)
    assert layout is not None
    return layout


def word(codes: list[int], bits: int) -> int:
    """Return a word of 32 bits as a signed number."""
    value = sum(int(code) << (bits * index) for index, code in enumerate(codes))
    return value - (1 << 32) if value >= 1 << 31 else value


def matrix(bits: int) -> IntegerMatrix:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (OUT, IN)).astype(np.uint8)
    zeros = rng.integers(1, 2**bits, (OUT, IN // GROUP)).astype(np.uint8)
    return IntegerMatrix(codes, rng.random((OUT, IN // GROUP)).astype(np.float32), zeros)


def test_pack_gptq_matches_its_published_layout():
    packed = layout_of(GPTQ).tensors("a", wanted := matrix(4))
    codes, zeros = wanted.codes, wanted.zeros.astype(int)
    assert packed["a.qweight"].shape == (IN // 8, OUT)
    assert packed["a.qweight"][2, 5] == word(list(codes[5, 16:24]), 4)
    assert packed["a.qzeros"].shape == (IN // GROUP, OUT // 8)
    assert packed["a.qzeros"][3, 1] == word(list(zeros[8:16, 3] - 1), 4)
    assert np.array_equal(packed["a.scales"], wanted.scales.T)
    assert np.array_equal(packed["a.g_idx"], np.arange(IN) // GROUP)


def test_pack_awq_matches_its_published_layout():
    packed = layout_of(AWQ).tensors("a", wanted := matrix(4))
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    assert packed["a.qweight"].shape == (IN, OUT // 8)
    assert packed["a.qweight"][7, 1] == word([wanted.codes[8 + each, 7] for each in order], 4)
    assert packed["a.qzeros"].shape == (IN // GROUP, OUT // 8)
    assert packed["a.qzeros"][3, 1] == word([wanted.zeros[8 + each, 3] for each in order], 4)
    assert np.array_equal(packed["a.scales"], wanted.scales.T)


@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: options["quant_method"])
def test_packed_weights_read_and_written_again_are_the_same_to_the_bit(options: dict[str, Any]):
    layout = layout_of(options)
    stored = layout.tensors("a", wanted := matrix(layout.bits))
    groups = np.arange(IN) // GROUP
    if options["quant_method"] == "gptq":
        groups = np.random.default_rng(0).permutation(groups)
        stored["a.g_idx"] = groups.astype(np.int32)
    source = PackedWeights(ArrayWeights(stored), layout)
    weight = read_stored("a", stored_layers(source)["a"], source)
    expected = (wanted.codes.astype(np.float32) - wanted.zeros[:, groups]) * wanted.scales[:, groups]
    np.testing.assert_allclose(dequantize(weight).numpy(), expected, rtol=1e-5, atol=1e-5)
    if options["quant_method"] == "gptq":
        return  # written models have groups of neighbours
    plain = {name: as_lazy(source.read(name)) for name in source.names() if not name.endswith("order")}
    again = pack_tensors(plain, layout, "float32")
    assert again.keys() == stored.keys()
    assert all(np.array_equal(as_lazy(again[name]).read(), stored[name]) for name in stored)


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_layout_of_groups_without_negative_weights_keeps_their_values(bits: int):
    """Zero points are stored minus 1, so the lowest code cannot be one."""
    integers = IntegerFormat(bits=bits, group_size=GROUP, symmetric=False)
    weight = np.abs(np.random.default_rng(0).standard_normal((OUT, IN))).astype(np.float32)
    weight[1], weight[2] = 0, -weight[2]
    rounded = round_to_nearest(weight, integers)
    middle = 1 << (bits - 1)
    codes, zeros = ((each.astype(np.int16) + middle).astype(np.uint8) for each in (rounded.codes, rounded.zeros))
    layout = layout_of({**GPTQ, "bits": bits, "desc_act": False})
    source = PackedWeights(ArrayWeights(layout.tensors("a", IntegerMatrix(codes, rounded.scales, zeros))), layout)
    found = dequantize(read_stored("a", stored_layers(source)["a"], source)).numpy()
    np.testing.assert_allclose(found, rounded.dequantized(), atol=1e-6)
    assert (np.abs(found - weight) <= 0.501 * rounded.scales.repeat(GROUP, axis=1)).all()


@pytest.mark.parametrize("case", CASES)
def test_packed_model_has_the_logits_of_transformers(case: str):
    golden = np.load(DATA / "packed_model" / case / "golden.npz")
    model = AutoModelForCausalLM.from_pretrained(DATA / "packed_model" / case)
    assert len(quantized_layers(model)) == 7
    with paddle.no_grad():
        logits = model(paddle.to_tensor(golden["input_ids"])).numpy()
    np.testing.assert_allclose(logits, golden["logits"], atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_packed_model_is_written_with_the_tensors_of_compressed_tensors(case: str):
    folder = DATA / "packed_model" / case
    options = json.loads((folder / "config.json").read_text())["quantization_config"]
    stored, source = SafetensorsFile(folder / "model.safetensors"), open_weights(folder)
    plain = {name: source.read(name) for name in source.names() if not name.endswith("order")}
    written = pack_tensors(plain, layout_of(options), "float32")
    assert written.keys() == set(stored.names())
    assert all(np.array_equal(as_lazy(written[name]).read(), stored.read(name)) for name in written)


def test_packed_model_saved_here_keeps_zero_points(tmp_path: Path):
    folder = DATA / "packed_model" / "int8_zero_points"
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = paddle.to_tensor(np.load(folder / "golden.npz")["input_ids"])
    with paddle.no_grad():
        assert np.array_equal(model(ids).numpy(), again(ids).numpy())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**GPTQ, "bits": 3}, "gptq with weights of 3 bits is not supported.*start from the original model"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "gptq with its version 'marlin'"),
        ({**AWQ, "version": "gemv"}, "awq with its version 'gemv'"),
        (
            {**COMPRESSED, "format": "nvfp4-pack-quantized"},
            "compressed-tensors with weights of type 'int' in the format 'nvfp4",
        ),
        ({**GPTQ, "bits": "4"}, "bits is '4', not an integer"),
        ({"quant_method": "hqq"}, "weights quantized by 'hqq' are not supported"),
    ],
)
def test_quantization_config_of_an_unsupported_variant_raises(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        from_quantization_config(options)


def test_packed_weights_with_unequal_groups_raise():
    layout = layout_of(GPTQ)
    stored = layout.tensors("a", matrix(4))
    stored["a.g_idx"] = np.zeros(IN, np.int32)
    source = PackedWeights(ArrayWeights(stored), layout)
    with pytest.raises(ValueError, match="a does not divide its 32 inputs into 4 groups of equal size"):
        read_stored("a", stored_layers(source)["a"], source)


@pytest.mark.parametrize("options", [AWQ, COMPRESSED], ids=lambda options: options["quant_method"])
def test_packed_weights_with_a_smaller_last_group_raise(options: dict[str, Any]):
    layout, full = layout_of(options), matrix(4)
    stored = layout.tensors("a", IntegerMatrix(full.codes, full.scales[:, :3], full.zeros[:, :3]))
    source = PackedWeights(ArrayWeights(stored), layout)
    with pytest.raises(ValueError, match="a does not divide its 32 inputs into 3 groups of equal size"):
        read_stored("a", stored_layers(source)["a"], source)


def test_packed_model_without_scales_raises(tmp_path: Path):
    shutil.copytree(DATA / "packed_model" / "int8_rows", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content.replace(b"q_proj.weight_scale", b"q_proj.weight_skale", 1))
    with pytest.raises(ValueError, match=r"q_proj\.weight_scale is missing; download or save the model again"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
