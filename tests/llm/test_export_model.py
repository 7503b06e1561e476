"""Test export_model.py, and predictor.py --mode static on its result, from command line to output files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paddlenlp_ext.checkpoint.tokenizer import AutoTokenizer
from paddlenlp_ext.cli import export_model
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.methods.prefix_tuning import PrefixTuningConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.static_graph import export
from tests.common.hybrid_models import QWEN3_5
from tests.common.models import TINY_LLAMA
from tests.common.scripts import LLM, load_script
from tests.llm.test_predictor import adapter, answers, base, data_file, save_tokenizer

__all__ = ["adapter", "base", "data_file"]  # fixtures

script = load_script(LLM / "predict" / "export_model.py")
FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.json",
    "model.pdiparams",
    "tokenizer.json",
    "tokenizer_config.json",
}


def run_export(model: Path, output: Path, *words: str) -> None:
    script.main(["--model_name_or_path", str(model), "--output_path", str(output), "--device", "cpu", *words])


@pytest.fixture(scope="module")
def exported(base: Path, adapter: Path, tmp_path_factory: Any) -> Path:
    """Export the tiny model with the adapter merged on the way."""
    folder = tmp_path_factory.mktemp("exported") / "out"
    run_export(base, folder, "--lora_path", str(adapter), "--dtype", "float32")
    return folder


def test_export_model_with_adapter_answers_as_the_dynamic_model(exported, base, adapter, data_file):
    expected = answers(base, data_file, "--lora_path", str(adapter))
    assert expected != answers(base, data_file)
    for batch_size in "13":
        assert answers(exported, data_file, "--mode", "static", "--batch_size", batch_size) == expected


def test_export_of_a_model_with_states_answers_as_the_dynamic_model(tmp_path, data_file):
    changes = {"vocab_size": 258, "initializer_range": 0.3, "tie_word_embeddings": False, "eos_token_id": 257}
    AutoModelForCausalLM.from_config({**TINY_LLAMA, **QWEN3_5, **changes}).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    run_export(tmp_path / "model", tmp_path / "out", "--dtype", "float32")
    expected = answers(tmp_path / "model", data_file)
    for batch_size in "13":
        assert answers(tmp_path / "out", data_file, "--mode", "static", "--batch_size", batch_size) == expected


def test_predictor_static_with_paddlenlps_arguments_checks_dtype_and_format(exported, data_file):
    words = ["--mode", "static", "--inference_model", "--block_attn", "--dtype", "float32", "--quant_type", ""]
    assert answers(exported, data_file, *words) == answers(exported, data_file, "--mode", "static")
    with pytest.raises(ValueError, match=r"--dtype bfloat16: .* was exported with float32; leave --dtype out"):
        answers(exported, data_file, "--mode", "static", "--dtype", "bfloat16")


def test_export_model_writes_paddlenlps_files_config_tokenizer_and_template(exported, base):
    assert {path.name for path in exported.iterdir()} == FILES
    config, source = (json.loads((folder / "config.json").read_text()) for folder in (exported, base))
    described = config.pop("static_graph")
    assert described == {
        "cache_dtype": "float32",
        "cache_shapes": [[2, 8]] * 4,
        "dtype": "float32",
        "quant_type": None,
        "state_shapes": [],
    }
    assert {key: config[key] for key in source} == source
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (exported, base)]
    assert tokenizers[0].chat_template == tokenizers[1].chat_template


@pytest.mark.parametrize("quant_type", ["weight_only_int8", "weight_only_int4"])
def test_export_model_with_quant_type_answers_as_the_quantized_model(quant_type, base, tmp_path, data_file):
    run_export(base, tmp_path / "out", "--quant_type", quant_type)
    expected = answers(base, data_file, "--quant_type", quant_type)
    assert answers(tmp_path / "out", data_file, "--mode", "static") == expected
    described = json.loads((tmp_path / "out" / "config.json").read_text())["static_graph"]
    assert described["quant_type"] == quant_type
    with pytest.raises(ValueError, match=f"--quant_type none: .* was exported with {quant_type}"):
        answers(tmp_path / "out", data_file, "--mode", "static", "--quant_type", "none")


def test_export_model_whose_logits_differ_leaves_nothing_behind(base, tmp_path, monkeypatch):
    monkeypatch.setitem(export.LIMITS, "float32", 1e-12)
    with pytest.raises(ValueError, match=r"not written: the relative difference of the logits .* is \d"):
        run_export(base, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_export_model_over_an_existing_folder_needs_overwrite(base, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    for name in ("config.json", "old"):
        (tmp_path / "out" / name).write_text("{}")
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="overwrite"):
        patched.setattr(export_model, "load_unmerged", None)  # the folder is checked before the model is loaded
        run_export(base, tmp_path / "out")
    run_export(base, tmp_path / "out", "--overwrite", "true", "--model_prefix", "smol")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"smol.json", "smol.pdiparams"} <= names and "old" not in names


def test_export_model_with_an_adapter_that_does_not_merge_raises(base, tmp_path):
    prefix = get_peft_model(AutoModelForCausalLM.from_pretrained(base), PrefixTuningConfig(num_prefix_tokens=2))
    prefix.save_pretrained(tmp_path / "prefix")
    with pytest.raises(ValueError, match="cannot be merged"):
        run_export(base, tmp_path / "out", "--lora_path", str(tmp_path / "prefix"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model_prefix", "config"], r"--model_prefix config: the model already has a file config\.json"),
        (["--model_prefix", "../x"], r"--model_prefix '\.\./x' is not a file name"),
        (["--model_prefix", ""], "--model_prefix '' is not a file name"),
    ],
)
def test_export_model_with_an_unusable_prefix_raises(words, message, base, tmp_path):
    with pytest.raises(ValueError, match=message):
        run_export(base, tmp_path / "out", *words)
    assert not list(tmp_path.iterdir())


def test_export_model_by_a_launcher_of_two_processes_raises(base, tmp_path, monkeypatch):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    with pytest.raises(ValueError, match="2 processes were started, but the export runs in one"):
        run_export(base, tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--lora_path", "x"],
            "--mode static: --lora_path cannot be used, because the exported model contains its adapter",
        ),
        (["--speculate_method", "inference_with_reference"], "--speculate_method needs logits of several"),
        ([], "not an exported model: "),
    ],
)
def test_predictor_static_with_what_the_program_lacks_raises(words, message, base, data_file):
    with pytest.raises(ValueError, match=message):
        answers(base, data_file, "--mode", "static", *words)


def test_export_model_with_paddlenlps_arguments_notes_those_without_effect(base, tmp_path, caplog):
    words = ["--inference_model", "true", "--block_attn", "1", "--max_length", "99", "--mode", "dynamic"]
    with caplog.at_level("INFO"):
        run_export(base, tmp_path / "out", *words)
    for name in ("inference_model", "block_attn", "max_length"):
        assert f"{name} has no effect" in caplog.text
    with pytest.raises(ValueError, match="did you mean 'output_path'"):
        script.main(["--model_name_or_path", str(base), "--output_pth", "x"])
