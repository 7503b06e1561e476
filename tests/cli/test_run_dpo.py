"""Program run_dpo.py: training, dry run and preview from files of pairs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from paddlenlp_ext.cli.run_finetune import run_finetune
from paddlenlp_ext.config import ConfigError
from paddlenlp_ext.config.parser import run_config_from
from paddlenlp_ext.config.run_config import PREFERENCE_SECTIONS
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.trainer.memory.run_estimate import estimate_run, outline_model

PAIRS = [{"prompt": f"{word} fig =", "chosen": f"fig {word}", "rejected": "lime lime plum"} for word in ("red", "blue")]


@pytest.fixture
def run(run_folders: Path):
    """Return a function that runs the program with pairs, and further keys."""
    (run_folders / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in 3 * PAIRS))

    def run_with(**more: Any) -> Path:
        keys = {
            "model_name_or_path": run_folders / "model",
            "train_dataset_path": run_folders / "pairs.jsonl",
            "dev_dataset_path": run_folders / "pairs.jsonl",
            "data_cache_dir": run_folders / "cache",
            "output_dir": run_folders / "out",
            "chat_template": "none",
            **dict.fromkeys(("do_train", "do_eval", "lora", "disable_tqdm"), "true"),
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "device": "cpu",
            **more,
        }
        words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        run_finetune(words, PREFERENCE_SECTIONS, "run_dpo.py")
        return run_folders / "out"

    return run_with


def test_run_dpo_trains_an_adapter_that_prefers_the_chosen_answers(run):
    folder = run(num_train_epochs=5, zero_padding="true", max_seq_len=64)
    results = json.loads((folder / "eval_results.json").read_text())
    assert results["eval_rewards/accuracies"] == 1 and results["eval_rewards/margins"] > 0.1
    assert (folder / "adapter_model.safetensors").is_file()
    config = json.loads((folder / "run_config.json").read_text())
    assert config["loss_type"] == "sigmoid" and config["max_length"] == 64
    first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert {"rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected"} <= first.keys()


def test_run_dpo_reference_is_the_adapter_that_a_run_starts_from(run, run_folders):
    """Train an adapter of a quantized model, then continue with it: rewards begin at zero again."""
    first = run(weight_quantize_algo="nf4", num_train_epochs=3)
    trained = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
    assert trained[0]["rewards/margins"] == pytest.approx(0, abs=1e-5) and trained[-1]["rewards/margins"] > 0.05
    (run_folders / "out").rename(run_folders / "first")
    again = run(weight_quantize_algo="nf4", lora_path=run_folders / "first", max_steps=1)
    entry = json.loads((again / "metrics.jsonl").read_text().splitlines()[0])
    assert entry["rewards/margins"] == pytest.approx(0, abs=1e-5) and entry["loss"] == pytest.approx(math.log(2))
    assert entry["logps/chosen"] > trained[0]["logps/chosen"] + 0.1


def test_run_dpo_dry_run_and_preview_train_nothing(run, run_folders, capsys):
    run(dry_run="true")
    run(preview_data=1)
    printed = capsys.readouterr().out
    assert "6 of 6 read" in printed and "optimizer steps" in printed and "pairs.jsonl:1" in printed
    assert "sigmoid; reference: one pass before training" in printed
    assert not (run_folders / "out").exists()


def test_run_dpo_dry_run_counts_the_copy_of_the_reference_model(run_folders):
    keys = {"model_name_or_path": str(run_folders / "model"), "output_dir": "out", "train_dataset_path": "rows.jsonl"}
    keys |= {"do_train": True, "device": "cpu"}
    estimates = []
    for steps in (-1, 5):
        config = run_config_from({**keys, "ref_model_update_steps": steps}, {}, peft_methods(), PREFERENCE_SECTIONS)
        outline = outline_model(ModelSource.from_config(config.model), config)
        estimates.append(estimate_run(config, outline, 100, 50))
    assert estimates[1].weights - estimates[0].weights == 4 * outline.num_base_parameters


def test_run_dpo_unknown_loss_is_an_error_with_its_name(run):
    with pytest.raises(ConfigError, match=r"loss_type.*sigmoidd"):
        run(loss_type="sigmoidd")
