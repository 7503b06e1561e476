"""Test quantized models: loading tensor by tensor, saving, reloading, mixed formats, damaged files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext import AutoModelForCausalLM
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.safetensors import save_sharded
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import dequantize_linears, load_quantized, quantized_layers
from paddlenlp_ext.quantization.quantize_weight import quantize
from paddlenlp_ext.quantization.quantized_weight_source import QuantizedWeights
from tests.golden import DATA

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 61,
    "hidden_size": 36,
    "intermediate_size": 46,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
IDS = paddle.to_tensor(np.random.default_rng(0).integers(0, 61, (2, 9)))
MIXED = {"q_proj": "nf4", ".*down_proj": "weight_only_int8", "v_proj": None, "up_proj": "weight_only_int4"}
FORMATS = [
    QuantizationConfig(algo="nf4"),
    QuantizationConfig(algo="nf4", double_quant=True, double_quant_block_size=16),
    QuantizationConfig(algo="fp4", block_size=34),
    QuantizationConfig(algo="nf4_symmetric", double_quant=True, double_quant_block_size=64),
    QuantizationConfig(algo="weight_only_int8", double_quant=True),
    QuantizationConfig(algo="weight_only_int4"),
    QuantizationConfig(algo="weight_only_int4", group_size=2),
    QuantizationConfig(algo=MIXED, double_quant=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(CONFIG, seed=3).save_pretrained(path)
    return path


def logits(model: paddle.nn.Layer) -> np.ndarray:
    with paddle.no_grad():
        return model(IDS).numpy()


@pytest.mark.parametrize("options", FORMATS, ids=lambda options: str(options.algo)[:20])
def test_quantized_model_save_and_reload_is_exact(folder: Path, tmp_path: Path, options: QuantizationConfig):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=options)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.quantization == options
    assert quantized_layers(again).keys() == quantized_layers(model).keys()
    for name, layer in quantized_layers(model).items():
        other = quantized_layers(again)[name].stored
        for part in ("algo", "shape", "block_size", "group_size"):
            assert getattr(other, part) == getattr(layer.stored, part)
        for part in ("codes", "scales", "group_scales", "offset"):
            saved_value, loaded_value = getattr(layer.stored, part), getattr(other, part)
            assert (saved_value is None) == (loaded_value is None)
            assert saved_value is None or np.array_equal(saved_value.numpy(), loaded_value.numpy()), f"{name}.{part}"
    assert np.array_equal(logits(again), logits(model))
    by = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"]
    assert by == ("bitsandbytes" if options == FORMATS[0] else "paddlenlp_ext"), (
        "bitsandbytes has no such formats or blocks"
    )


@pytest.mark.parametrize("options", FORMATS[:5], ids=lambda options: str(options.algo))
def test_quantized_model_leaves_other_parameters_unchanged(folder: Path, options: QuantizationConfig):
    plain = AutoModelForCausalLM.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=options)
    weights = dict(plain.named_parameters())
    assert len(quantized_layers(model)) == 14 and isinstance(model.lm_head, Linear)
    for name, parameter in model.named_parameters():  # embeddings, head, norms, biases
        assert np.array_equal(parameter.numpy(), weights[name].numpy())
    for name, layer in quantized_layers(model).items():
        expected = dequantize(quantize(weights[f"{name}.weight"], options.for_layer(name)))
        assert np.array_equal(layer.weight_value().numpy(), expected.numpy())
    dequantize_linears(model)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        name: tuple(p.shape) for name, p in plain.named_parameters()
    }
    assert model.quantization is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantized_model_weights_stand_for_the_dtype_of_loading(folder: Path, tmp_path: Path, dtype: str):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=FORMATS[0])
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    for loaded in (model, again):
        assert {layer.stored.dtype for layer in quantized_layers(loaded).values()} == {getattr(paddle, dtype)}


def test_quantized_model_algo_map_mixes_formats(folder: Path):
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=QuantizationConfig(algo=MIXED, double_quant=True)
    )
    layer = model.model.layers[1]
    assert layer.self_attn.q_proj.stored.algo == "nf4" and layer.self_attn.q_proj.stored.group_scales is not None
    assert layer.mlp.down_proj.stored.algo == "weight_only_int8" and layer.mlp.down_proj.stored.group_scales is None
    assert isinstance(layer.self_attn.v_proj, Linear) and isinstance(layer.mlp.gate_proj, Linear)


def test_quantization_invalid_request_raises(folder: Path, tmp_path: Path):
    load = AutoModelForCausalLM.from_pretrained
    with pytest.raises(ValueError, match=r"'q_prj' matches no linear layer of this model.*q_proj"):
        load(folder, quantization_config=QuantizationConfig(algo={"q_prj": "nf4"}))
    load(folder, quantization_config=QuantizationConfig(algo="nf4")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="already quantized"):
        load(tmp_path, quantization_config=QuantizationConfig(algo="nf4"))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "aqlm", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="weights quantized by 'aqlm' are not supported"):
        load(tmp_path)


def test_load_quantized_after_an_error_has_replaced_no_layer(folder: Path, monkeypatch: pytest.MonkeyPatch):
    packed = QuantizedWeights.packed

    def fail_at_the_last(self: QuantizedWeights, name: str) -> Any:
        if name == "model.layers.1.mlp.down_proj":
            raise ValueError("damaged")
        return packed(self, name)

    monkeypatch.setattr(QuantizedWeights, "packed", fail_at_the_last)
    model = AutoModelForCausalLM.from_config(CONFIG, seed=0)
    with pytest.raises(ValueError, match="damaged"):
        load_quantized(model, open_weights(folder), QuantizationConfig(algo="nf4"))
    assert quantized_layers(model) == {}


def test_load_damaged_quantized_weight_names_it(folder: Path, tmp_path: Path):
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=QuantizationConfig(algo="nf4")).save_pretrained(
        tmp_path
    )
    source = open_weights(tmp_path)
    tensors = {name: source.read(name) for name in source.names()}
    scales = "model.layers.0.mlp.up_proj.weight.absmax"
    for change in ({scales: tensors[scales][:-1]}, {scales.replace("absmax", "quant_map"): np.zeros(16, np.float32)}):
        save_sharded(tmp_path, {**tensors, **change})
        with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.up_proj\.weight"):
            AutoModelForCausalLM.from_pretrained(tmp_path)
    save_sharded(tmp_path, {name: tensor for name, tensor in tensors.items() if name != scales})
    with pytest.raises(ValueError, match=r"up_proj\.weight is missing or damaged"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("blocks", [0, 1000])
def test_load_integers_with_another_number_of_scales_raises(folder: Path, tmp_path: Path, blocks: int):
    options = QuantizationConfig(algo="weight_only_int8")
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=options).save_pretrained(tmp_path)
    source = open_weights(tmp_path)
    tensors = {name: source.read(name) for name in source.names()}
    scales = "model.layers.0.mlp.up_proj.weight_scale"
    save_sharded(tmp_path, {**tensors, scales: np.ones((len(tensors[scales]), blocks), np.float32)})
    with pytest.raises(ValueError, match=r"quantized model\.layers\.0\.mlp\.up_proj\.weight do not match"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_load_too_few_group_scales_raises(folder: Path, tmp_path: Path):
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=FORMATS[1]).save_pretrained(tmp_path)
    source = open_weights(tmp_path)
    tensors = {name: source.read(name) for name in source.names()}
    groups = "model.layers.0.mlp.up_proj.weight.nested_absmax"
    save_sharded(tmp_path, {**tensors, groups: tensors[groups][:-1]})
    with pytest.raises(
        ValueError, match=r"the tensors of the quantized model\.layers\.0\.mlp\.up_proj\.weight do not match"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("options", [FORMATS[1], FORMATS[4]], ids=lambda options: options.algo)
def test_load_half_precision_scales_are_widened(folder: Path, tmp_path: Path, options: QuantizationConfig):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=options)
    model.save_pretrained(tmp_path)
    source = open_weights(tmp_path)
    tensors = {name: paddle.to_tensor(source.read(name)) for name in source.names()}
    scales = [name for name in tensors if name.endswith(("_scale", "nested_absmax"))]
    save_sharded(tmp_path, {**tensors, **{name: tensors[name].astype("bfloat16") for name in scales}})
    np.testing.assert_allclose(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model), rtol=0, atol=0.1)


@pytest.mark.parametrize("part", ["", ".absmax"])
def test_load_codes_of_wrong_dtype_raises(folder: Path, tmp_path: Path, part: str):
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=FORMATS[1]).save_pretrained(tmp_path)
    source = open_weights(tmp_path)
    name = f"model.layers.0.mlp.up_proj.weight{part}"
    tensors = {each: source.read(each) for each in source.names()}
    save_sharded(tmp_path, {**tensors, name: tensors[name].astype(np.int32)})
    with pytest.raises(
        ValueError, match=r"the tensors of the quantized model\.layers\.0\.mlp\.up_proj\.weight do not match"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["nf4_double", "fp4", "nf4_double_fused"])
def test_load_bitsandbytes_folder_matches_reference(name: str):
    """Compare with bitsandbytes (tests/golden/generators/make_quantized_model_golden.py)."""
    path = DATA / "quantized_model" / name
    model = AutoModelForCausalLM.from_pretrained(path)
    assert len(quantized_layers(model)) == 14
    stored = np.load(path / "golden.npz")
    with paddle.no_grad():
        found = model(paddle.to_tensor(stored["input_ids"])).numpy()
    np.testing.assert_allclose(found, stored["logits"], rtol=0, atol=2e-5)


def test_save_pretrained_writes_tensors_of_bitsandbytes(tmp_path: Path):
    """Load a folder of transformers and save it again: the tensors are bitwise equal."""
    path = DATA / "quantized_model" / "nf4_double"
    AutoModelForCausalLM.from_pretrained(path).save_pretrained(tmp_path)
    theirs, ours = open_weights(path), open_weights(tmp_path)
    assert set(ours.names()) == set(theirs.names())
    for name in theirs.names():
        if "quant_state" in name:
            assert json.loads(ours.read(name).tobytes()) == json.loads(theirs.read(name).tobytes())
        else:
            assert ours.dtype(name) == theirs.dtype(name)
            assert np.array_equal(ours.read(name), theirs.read(name)), name
    fields, expected = (
        json.loads((folder / "config.json").read_text())["quantization_config"] for folder in (tmp_path, path)
    )
    assert expected["llm_int8_skip_modules"] is None  # excludes the lm_head only
    expected["llm_int8_skip_modules"] = ["lm_head"]
    assert {key: value for key, value in fields.items() if expected.get(key, value) != value} == {}


PEAK = """
import sys
from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

from paddlenlp_ext import AutoModelForCausalLM
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantized_layers
def peak():  # from /proc, as getrusage also counts memory of the parent process
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
small = QuantizationConfig(algo=sys.argv[2], double_quant=True)
AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=small)  # memory that loading takes for any size
before = peak()
model = AutoModelForCausalLM.from_pretrained(sys.argv[3], quantization_config=small)
packed = sum(layer.num_bytes for layer in quantized_layers(model).values())
print("bytes", peak() - before, packed + sum(4 * p.size for p in model.parameters()), flush=True)
"""


EXPERTS = {"model_type": "mixtral", "num_local_experts": 32, "intermediate_size": 512, "num_hidden_layers": 1}
"""Sizes of a model with 67 MB of fp32 numbers in one stack of experts."""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize(("algo", "changes"), [("nf4", {}), ("weight_only_int8", EXPERTS)], ids=["dense", "experts"])
def test_load_quantized_peak_memory_is_model_plus_few_tensors(folder: Path, tmp_path: Path, algo: str, changes: Any):
    """Load a model of more than 100 MB in fp32, whose full-precision weights must never all be in memory."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = {**CONFIG, **sizes, "num_hidden_layers": 8, **changes}
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    command = [sys.executable, "-c", PEAK, str(folder), algo, str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    peak, model = map(int, output.splitlines()[-1].split()[1:])
    largest_tensor = 4 * 512 * 2048
    assert model < 134e6 / 3
    assert peak < model + 8 * largest_tensor, f"{peak / 1e6:.0f} MB for a model of {model / 1e6:.0f} MB"
