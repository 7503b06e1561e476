"""Command run_finetune.py: exit codes of a process, output and files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.common.scripts import ROOT, load_script

SCRIPT = ROOT / "llm" / "run_finetune.py"


def launch(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "120"}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def run_here(*arguments: object) -> None:
    """Run the command in this process, which does not import Paddle again."""
    load_script(SCRIPT).main([str(argument) for argument in arguments])


@pytest.fixture
def config_file(run_folders: Path) -> Path:
    keys = {
        "model_name_or_path": str(run_folders / "model"),
        "dataset_name_or_path": str(run_folders / "data"),
        "data_cache_dir": str(run_folders / "cache"),
        "output_dir": str(run_folders / "out"),
        "chat_template": "none",
        "do_train": True,
        "do_eval": True,
        "max_steps": 3,
        "max_length": 64,
        "src_length": 32,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "lora": True,
        "device": "cpu",
    }
    path = run_folders / "config.json"
    path.write_text(json.dumps(keys, indent=2))
    return path


def test_run_finetune_stays_a_thin_script():
    assert len(SCRIPT.read_text().splitlines()) <= 80


def test_run_finetune_names_every_problem_at_once_before_reading_weights(config_file):
    text = config_file.read_text().replace('"lora": true', '"lora": true, "lora_rnak": 8, "learning_rate": "fast"')
    config_file.write_text(text)
    result = launch(config_file, "--max_stesp", 3)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    for words in ("lora_rnak", "lora_rank", "config.json:14:", "learning_rate", "--max_stesp", "max_steps"):
        assert words in result.stderr


def test_run_finetune_dry_run_counts_everything_and_reads_no_weights(config_file, run_folders, capsys):
    (run_folders / "model" / "model.safetensors").unlink()
    run_here(config_file, "--dry_run")
    printed = capsys.readouterr().out
    for words in (
        "12 of 12 read",
        "optimizer steps",
        "3 (",
        "activations",
        "total",
        "17,472 parameters",
        "lora: 7,424 parameters",
    ):
        assert words in printed
    assert not (run_folders / "out").exists()


def test_run_finetune_preview_data_prints_rows_as_the_model_sees_them(config_file, run_folders, capsys):
    run_here(config_file, "--show_data", 2)
    printed = capsys.readouterr().out
    assert printed.count("tokens, ") == 2
    assert "train.json:1" in printed and "red apple =" in printed
    assert not (run_folders / "out").exists()


def test_run_finetune_leaves_its_folder_and_rejects_a_second_run_in_it(config_file, run_folders):
    first = launch(config_file, "--save_strategy", "steps", "--save_steps", 2)
    assert first.returncode == 0, first.stderr
    written = {path.name for path in (run_folders / "out").iterdir()}
    assert written >= {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "run_config.json", "train_results.json",
        "eval_results.json", "all_results.json", "trainer_state.json", "metrics.jsonl", "loss.png", "checkpoint-2",
    }  # fmt: skip
    log = json.loads((run_folders / "out" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in log if "loss" in entry] == [1, 2, 3]

    with pytest.raises(ValueError, match=r"resume_from_checkpoint.*overwrite_output_dir"):
        run_here(config_file)
    run_here(config_file, "--resume_from_checkpoint", "true", "--max_steps", 4)
    assert json.loads((run_folders / "out" / "train_results.json").read_text())["step"] == 4


def test_run_finetune_help_lists_every_key_with_its_default():
    result = launch("--help")
    assert result.returncode == 0
    for words in ("--lora_rank", "--greedy_zero_padding", "--learning_rate", "5e-05"):
        assert words in result.stdout


def test_trainer_build_imports_nothing_heavy():
    heavy = ["transformers", "tokenizers", "jinja2", "gguf", "matplotlib", "scipy", "pandas", "visualdl", "triton"]
    code = (
        "import sys, paddle; before = set(sys.modules)\n"
        "import paddlenlp_ext.trainer.build_trainer\n"
        "from paddlenlp_ext.peft.registry import peft_methods; peft_methods()\n"
        f"print(sorted(set({heavy}) & (set(sys.modules) - before)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr
