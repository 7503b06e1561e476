"""Quantize a tiny model from the command line, train an adapter over it, and merge the adapter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext import AutoModelForCausalLM, finetune, merge_adapter
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.quantized_formats.registry import LAYOUTS
from paddlenlp_ext.cli import run_quantization as cli
from paddlenlp_ext.cli.run_quantization import options_of_section, run_quantization
from paddlenlp_ext.config import load_run_config
from paddlenlp_ext.config.errors import ConfigError
from paddlenlp_ext.config.run_config import QUANTIZATION_SECTIONS
from paddlenlp_ext.config.sections.ptq import PTQConfig
from paddlenlp_ext.quantization.ptq.integer_format import IntegerFormat
from paddlenlp_ext.quantization.ptq.quantize_matrix import PostTrainingOptions
from paddlenlp_ext.quantization.quantize_model import quantized_layers
from tests.common.models import write_tiny_data, write_tiny_model

IDS = paddle.to_tensor([[5, 9, 3, 11]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantization")
    write_tiny_model(path / "model")
    write_tiny_data(path / "data")
    return path


def arguments(folder: Path, output: Path, *more: str) -> list[str]:
    keys = {"model_name_or_path": folder / "model", "dataset_name_or_path": folder / "data", "output_dir": output}
    keys |= {"group_size": 16, "device": "cpu"}
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))] + list(more)


def logits(folder: Path) -> np.ndarray:
    with paddle.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(IDS).numpy()


@pytest.mark.parametrize(
    ("method", "layout", "quant_method", "names"),
    [
        ("do_ptq", "compressed-tensors", "compressed-tensors", ("weight_packed", "weight_scale", "weight_shape")),
        ("do_gptq", "gptq", "gptq", ("qweight", "qzeros", "scales", "g_idx")),
        ("do_awq", "awq", "awq", ("qweight", "qzeros", "scales")),
    ],
)
def test_run_quantization_writes_a_model_that_loads(folder, tmp_path, capsys, method, layout, quant_method, names):
    output = tmp_path / "quantized"
    run_quantization(arguments(folder, output, f"--{method}", "--weight_layout", layout))
    assert "quantized: 14 layers" in capsys.readouterr().out
    config = json.loads((output / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == quant_method
    header = (output / "model.safetensors").read_bytes()[:20000]
    assert all(f"model.layers.1.mlp.down_proj.{name}".encode() in header for name in names)
    assert len(quantized_layers(AutoModelForCausalLM.from_pretrained(output))) == 14
    assert (output / "tokenizer_config.json").is_file()
    assert 0 < np.abs(logits(output) - logits(folder / "model")).mean() < 0.5 * np.abs(logits(folder / "model")).mean()
    with pytest.raises(ValueError, match="already exists"):
        run_quantization(arguments(folder, output, "--do_ptq"))


def test_run_quantization_reads_the_batches_of_its_keys(folder, tmp_path, monkeypatch):
    class ReachedError(Exception):
        pass

    def record(source, options, batches, report):
        raise ReachedError(batches)

    monkeypatch.setattr(cli, "quantize_after_training", record)
    words = ["--do_gptq", "--gptq_step", "2", "--per_device_train_batch_size", "3"]
    with pytest.raises(ReachedError) as stopped:
        run_quantization(arguments(folder, tmp_path / "out", *words))
    (batches,) = stopped.value.args
    assert [len(batch) for batch in batches] == [3, 3]


def test_options_of_section_follow_its_keys():
    keys = {"quant_type": "weight_only_int8", "group_size": 64, "sym": False, "weight_layout": "gptq"}
    section = PTQConfig(
        do_gptq=True, desc_act=True, gptq_damping=0.05, auto_clip=False, skip_list_names=["o_proj"], **keys
    )
    integers = IntegerFormat(bits=8, group_size=64, symmetric=False)
    options = PostTrainingOptions(
        method="gptq", integers=integers, act_order=True, damping=0.05, clips=False, skipped=("o_proj",)
    )
    layout = LAYOUTS["gptq"](bits=8, group_size=64, symmetric=False)
    assert options_of_section(section) == (options, layout)
    by_row, layout = options_of_section(replace(section, weight_quant_method="abs_max_channel_wise"))
    assert by_row.integers.group_size is None and layout.group_size is None


def test_adapter_over_a_model_in_a_packed_layout_trains_and_merges(folder, tmp_path):
    base, adapter, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    run_quantization(arguments(folder, base, "--do_gptq", "--sym", "false"))
    run = {"model_name_or_path": str(base), "dataset_name_or_path": str(folder / "data"), "output_dir": str(adapter)}
    run |= {"lora": True, "do_train": True, "max_steps": 3, "learning_rate": 0.01, "device": "cpu"}
    result = finetune(run)
    assert result.metrics["train_loss"] > 0
    merge_adapter(adapter, merged)
    assert not quantized_layers(AutoModelForCausalLM.from_pretrained(merged))
    assert np.abs(logits(merged) - logits(base)).max() > 1e-4
    names = open_weights(merged).names()
    assert not any(name.endswith(("weight_zero", "weight_scale", "weight_packed")) for name in names)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no quantization method is on; set one of do_ptq, do_gptq, do_awq to true"),
        (["--do_gptq", "--do_awq"], "do_gptq and do_awq are both true; keep one"),
        (["--do_gptq"], "do_gptq needs dataset_name_or_path, which is not set"),
        (["--do_ptq", "--smooth"], "smooth: True is not available yet .*only weights"),
        (["--do_ptq", "--weight_layout", "awq", "--quant_type", "weight_only_int8"], "awq stores only 4-bit weights"),
        (["--do_ptq", "--weight_quantize_algo", "nf4"], "weight_quantize_algo applies only to training"),
        (["--do_ptq", "--quant_type", "a8w8"], "a8w8.* is not one of: weight_only_int4, weight_only_int8"),
    ],
)
def test_quantization_config_that_contradicts_itself_raises(words: list[str], message: str):
    given = ["--model_name_or_path", "m", "--output_dir", "o", *words]
    with pytest.raises(ConfigError, match=message):
        load_run_config(given, {}, QUANTIZATION_SECTIONS)


def test_quantization_config_notes_keys_without_effect():
    words = ["--model_name_or_path", "m", "--output_dir", "o", "--do_ptq", "--desc_act", "--learning_rate", "0.1"]
    config = load_run_config([*words, "--ptq_step", "16"], {}, QUANTIZATION_SECTIONS)
    notes = "\n".join(config.notes)
    for note in ("desc_act has no effect: do_gptq is false", "learning_rate has no effect: nothing is trained"):
        assert note in notes
    assert "ptq_step has no effect" in notes
