"""Adapters trained on a quantized base: merging, prediction, and loading with another base."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.api import merge_adapter
from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.cli.predict import load_predictor
from paddlenlp_ext.cli.predict_arguments import parse_arguments
from paddlenlp_ext.inference.auto_peft_model import AutoPeftModelForCausalLM
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.peft.formats.read_adapter import read_adapter
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantized_layers
from paddlenlp_ext.quantization.quantize_weight import quantize
from paddlenlp_ext.utils.run_command import run_command
from tests.common.adapters import default_config
from tests.common.models import ODD_SIZES
from tests.common.scripts import LLM, load_script

CONFIG = {
    "model_type": "qwen2",
    **ODD_SIZES,
}
IDS = paddle.to_tensor(np.random.default_rng(1).integers(0, 61, (3, 17)))
NF4 = QuantizationConfig(algo="nf4", double_quant=True)
MIXED = QuantizationConfig(algo={".*self_attn.*": "fp4", "down_proj": "weight_only_int8"})
METHODS = {
    **{switch: (switch, {}) for switch in PEFT_METHODS.names() if PEFT_METHODS.get(switch).mergeable},
    "lora": ("lora", {"rank": 3}),
    "use_dora": ("use_dora", {"rank": 2}),
    "pissa": ("pissa", {"rank": 3}),
    "loftq": ("loftq", {"rank": 3, "iters": 2}),
    "some layers": ("lora", {"rank": 3, "target_modules": ["q_proj", "up_proj"]}),
}
RENAMED = {
    "lfm2": {"full_attn_idxs": [1], "block_auto_adjust_ff_dim": False},
    "phi3": {"pad_token_id": 0},
}


def run(path: str, *arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        run_command(load_script(LLM / path).main, [str(argument) for argument in arguments])
        raise SystemExit(0)
    return ended.value.code


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    AutoModelForCausalLM.from_config(CONFIG, seed=3).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    return folder


def logits(model: paddle.nn.Layer) -> np.ndarray:
    model.eval()
    with paddle.no_grad():
        return model(IDS).numpy()


def trained(base: Path, folder: Path, method: str = "lora", options: QuantizationConfig = NF4) -> np.ndarray:
    """Save an adapter of the quantized base with random changes; return the logits of base and adapter."""
    switch, settings = METHODS[method]
    config = default_config(switch, **settings)
    quantized = read_model_config(base).get("quantization_config") is not None
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=None if quantized else options, before_quantizing=config.before_quantizing
    )
    model = get_peft_model(model, config)
    paddle.seed(0)
    for tensor in model.parameters():
        if not tensor.stop_gradient:
            tensor.set_value(tensor + 0.05 * paddle.randn(tensor.shape))
    model.save_pretrained(folder)
    fields = json.loads((folder / "adapter_config.json").read_text())
    assert fields["base_model_name_or_path"] == str(base)
    return logits(model)


@pytest.mark.parametrize("options", [NF4, MIXED], ids=["nf4", "mixed"])
@pytest.mark.parametrize("method", METHODS)
def test_merge_peft_params_over_quantized_base_equals_trained_model(
    base: Path, tmp_path: Path, method: str, options: QuantizationConfig
):
    expected = trained(base, tmp_path / "adapter", method, options)
    assert read_adapter(tmp_path / "adapter").quantization == options
    assert run("merge_peft_params.py", "--peft_path", tmp_path / "adapter", "--output_path", tmp_path / "merged") == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.quantization is None and "quantization_config" not in read_model_config(tmp_path / "merged")
    np.testing.assert_allclose(logits(merged), expected, rtol=1e-5, atol=1e-5)
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "merged into: the dequantized weights that the adapter was trained on" in card and options.describe() in card


def test_merge_peft_params_layers_without_adapter_are_dequantized(base: Path, tmp_path: Path):
    trained(base, tmp_path / "adapter", "some layers")
    run("merge_peft_params.py", "--peft_path", tmp_path / "adapter", "--output_path", tmp_path / "merged")
    plain = dict(AutoModelForCausalLM.from_pretrained(base).named_parameters())
    merged = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").named_parameters())
    name = "model.layers.1.mlp.down_proj.weight"
    assert np.array_equal(merged[name].numpy(), dequantize(quantize(plain[name], NF4)).numpy())
    assert np.array_equal(merged["lm_head.weight"].numpy(), plain["lm_head.weight"].numpy())


@pytest.mark.parametrize("method", ["lora", "pissa", "loftq"])
def test_merge_peft_params_into_original_weights_reports_the_difference(
    base: Path, tmp_path: Path, method: str, capsys: pytest.CaptureFixture
):
    expected = trained(base, tmp_path / "adapter", method)
    arguments = ("--peft_path", tmp_path / "adapter", "--output_path", tmp_path / "merged", "--merge_base", "original")
    assert run("merge_peft_params.py", *arguments) == 0
    plain = AutoModelForCausalLM.from_pretrained(base)
    over_original = PeftModel.from_files(plain, read_adapter(tmp_path / "adapter"))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    np.testing.assert_allclose(merged, logits(over_original), rtol=0, atol=1e-5)
    assert np.abs(merged - expected).max() > 0.05
    printed, card = capsys.readouterr().out, (tmp_path / "merged" / "README.md").read_text()
    assert "merged into the original weights" in printed and "merged into: the original weights" in card
    measured = float(printed.rpartition("merging by up to ")[2].partition(".\n")[0])
    assert f"trained\n  model by up to {measured:.3g}" in card and measured > 0.05


def test_merge_lora_params_over_stored_quantized_base_equals_trained_model(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    stored = tmp_path / "stored"
    AutoModelForCausalLM.from_pretrained(base, quantization_config=NF4).save_pretrained(stored)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (stored / name).write_text("{}")
    expected = trained(stored, tmp_path / "adapter")
    merge = ("--lora_path", tmp_path / "adapter", "--output_path", tmp_path / "merged")
    assert run("merge_lora_params.py", *merge) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    np.testing.assert_allclose(logits(merged), expected, rtol=0, atol=1e-5)
    merge = ("--lora_path", tmp_path / "adapter", "--output_path", tmp_path / "other", "--merge_base", "original")
    assert run("merge_lora_params.py", *merge) == 2
    assert "is stored quantized; pass the original model" in capsys.readouterr().err
    assert run("merge_lora_params.py", *merge, "--model_name_or_path", base) == 0
    int8 = tmp_path / "int8"
    AutoModelForCausalLM.from_pretrained(
        base, quantization_config=QuantizationConfig(algo="weight_only_int8")
    ).save_pretrained(int8)
    assert run("merge_lora_params.py", *merge[:2], "--output_path", tmp_path / "x", "--model_name_or_path", int8) == 2
    assert "use the base of the training run, or the original model" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["lora", "pissa"])
def test_load_predictor_quantizes_the_base_as_in_training(
    base: Path, tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logging.getLogger("paddlenlp_ext"), "propagate", True)
    expected = trained(base, tmp_path / "adapter", method)
    lengths = ["--src_length", "20", "--max_length", "4"]
    arguments = parse_arguments(["--model_name_or_path", str(base), "--lora_path", str(tmp_path / "adapter"), *lengths])
    model = load_predictor(arguments, str(base), str(tmp_path / "adapter"))
    assert len(quantized_layers(model)) == 14 and len(list(adapter_layers(model))) == 14
    assert np.array_equal(logits(model), expected)
    assert "quantized: 14 layers" in caplog.text
    assert [len(answer) for answer in model.generate([[1, 2, 3], [4]], max_new_tokens=4, eos_token_id=[])] == [4, 4]


def test_load_weights_over_another_quantization_raises_or_warns(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    trained(base, tmp_path / "adapter")
    config = PEFT_METHODS.get("lora")(rank=3)
    other = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    error = "on weights in nf4, blocks of 64, .*full precision; set weight_quantize_algo and the related keys"
    with pytest.raises(ValueError, match=error):
        other.load_weights(tmp_path / "adapter")
    monkeypatch.setattr(logging.getLogger("paddlenlp_ext"), "propagate", True)
    warning = "and is used with weights in full precision; outputs will differ from training"
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    assert warning in caplog.text
    caplog.clear()
    path = str(tmp_path / "adapter")
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), PEFT_METHODS.get("lora")(path=path))
    assert warning in caplog.text
    caplog.clear()
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, quantization_config=NF4), tmp_path / "adapter")
    assert not caplog.text


@pytest.mark.parametrize("method", ["pissa", "loftq"])
@pytest.mark.parametrize("family", RENAMED)
def test_factors_before_quantization_of_layers_with_other_names_in_files_are_found(tmp_path, family, method):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    config = {**ODD_SIZES, "model_type": family, **RENAMED[family]}
    AutoModelForCausalLM.from_config(config, seed=3).save_pretrained(base)
    expected = trained(base, adapter, method)
    loaded = AutoPeftModelForCausalLM.from_pretrained(adapter)
    np.testing.assert_allclose(logits(loaded), expected, atol=2e-5)
    arguments = parse_arguments(["--model_name_or_path", str(base), "--src_length", "20", "--max_length", "4"])
    np.testing.assert_allclose(logits(load_predictor(arguments, str(base), str(adapter))), expected, atol=2e-5)
    merge_adapter(adapter, tmp_path / "merged")
    np.testing.assert_allclose(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), expected, atol=2e-5)
