"""Command line of finetune_generation.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddlenlp_ext.cli.finetune_generation import run_finetune_arguments
from paddlenlp_ext.config import load_run_config
from paddlenlp_ext.peft.registry import peft_methods

NF4 = ["--weight_quantize_algo", "nf4"]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--config", "a.json"], ["a.json"]),
        (["--config=a.json", "--lora=b.json"], ["a.json", "--lora", "b.json"]),
        (["--config", "a.json", "--q_lora", "b.json"], ["a.json", "--lora", "b.json", *NF4]),
        (["--config", "a.json", "--q-lora=b.json", "--seed", "3"], ["a.json", "--lora", "b.json", "--seed", "3", *NF4]),
        (
            ["--q_lora", "b.json", "--weight_quantize_algo=fp4"],
            ["--lora", "b.json", "--weight_quantize_algo=fp4"],
        ),
        (["a.json", "--lora", "true"], ["a.json", "--lora", "true"]),
    ],
)
def test_run_finetune_arguments_former_names_are_translated(argv, expected):
    assert run_finetune_arguments(argv) == expected


@pytest.mark.parametrize("argv", [["--config"], ["--config", "--lora"], ["a.json", "--q_lora", "true"]])
def test_run_finetune_arguments_missing_file_raises(argv):
    with pytest.raises(ValueError, match=r"a \.json or \.yaml file is missing after --(config|q_lora)"):
        run_finetune_arguments(argv)


def write(path: Path, keys: str) -> str:
    path.write_text('{"model_name_or_path": "m", "dataset_name_or_path": "d", "output_dir": "o", ' + keys + "}")
    return str(path)


def test_run_finetune_arguments_lora_file_takes_precedence_over_config(tmp_path):
    sft = write(tmp_path / "sft.json", '"do_train": true, "learning_rate": 3e-5, "max_length": 128, "src_length": 64')
    lora = write(tmp_path / "lora.json", '"do_train": true, "learning_rate": 3e-4, "lora_rank": 4')
    config = load_run_config(run_finetune_arguments(["--config", sft, "--lora", lora]), peft_methods())
    assert (config.optim.learning_rate, config.data.max_length, config.peft.rank) == (3e-4, 128, 4)
    assert config.model.weight_quantize_algo is None


@pytest.mark.parametrize(("format_key", "expected"), [("", "nf4"), (', "weight_quantize_algo": "fp4"', "fp4")])
def test_run_finetune_arguments_q_lora_quantizes_unless_the_file_chooses(tmp_path, format_key, expected):
    lora = write(tmp_path / "lora.json", f'"do_train": true{format_key}')
    config = load_run_config(run_finetune_arguments(["--q_lora", lora]), peft_methods())
    assert (config.peft_switch, config.model.weight_quantize_algo) == ("lora", expected)
