"""Programs run_reward.py and reward_predictor.py: training, dry run, and scores of a file of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddlenlp_ext import (
    AutoModelForSequenceClassification,
    AutoPeftModelForSequenceClassification,
    AutoTokenizer,
    score,
)
from paddlenlp_ext.cli.reward_predictor import reward_predictor
from paddlenlp_ext.cli.run_finetune import run_finetune
from paddlenlp_ext.config.run_config import REWARD_SECTIONS

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
            **dict.fromkeys(("do_train", "do_eval", "disable_tqdm", "zero_padding"), "true"),
            "max_seq_len": 64,
            "per_device_train_batch_size": 2,
            "num_train_epochs": 5,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "device": "cpu",
            **more,
        }
        words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        run_finetune(words, REWARD_SECTIONS, "run_reward.py")
        return run_folders / "out"

    return run_with


def predict(folder: Path, model: Path, **more: Any) -> list[dict]:
    """Return the rows that reward_predictor.py writes for a pair and for one of its answers."""
    rows = [PAIRS[0], {"src": PAIRS[1]["prompt"], "tgt": PAIRS[1]["chosen"]}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"model_name_or_path": model, "data_file": folder / "rows.jsonl", "output_file": folder / "rewards.jsonl"}
    reward_predictor([word for key, value in {**keys, **more}.items() for word in (f"--{key}", str(value))])
    lines = [json.loads(line) for line in (folder / "rewards.jsonl").read_text().splitlines()]
    assert [{**line, "rewards": None} for line in lines] == [{**row, "rewards": None} for row in rows]
    return lines


@pytest.mark.parametrize("keys", [{"lora": "true"}, {"lora": "true", "weight_quantize_algo": "nf4"}, {}])
def test_run_reward_trains_a_model_whose_scores_are_predicted(run, run_folders, keys):
    folder = run(**keys)
    results = json.loads((folder / "eval_results.json").read_text())
    assert results["eval_accuracy"] == 1 and results["eval_margin"] > 0.5
    logged = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert {"accuracy", "margin", "mean_reward", "min_reward", "max_reward"} <= logged.keys()
    pair, single = predict(run_folders, folder)
    chosen, rejected = pair["rewards"]
    assert chosen - rejected > 0.3 and len(single["rewards"]) == 1

    auto = AutoPeftModelForSequenceClassification if keys else AutoModelForSequenceClassification
    model, tokenizer = auto.from_pretrained(str(folder)), AutoTokenizer.from_pretrained(folder)
    rows = [PAIRS[0], {"src": PAIRS[1]["prompt"], "tgt": PAIRS[1]["chosen"]}]
    for own, line in zip(score(model, tokenizer, rows, chat_template="none"), (pair, single), strict=True):
        np.testing.assert_allclose(own, line["rewards"], rtol=0, atol=1e-6)
    if not keys:
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == ["LlamaForSequenceClassification"] and config["pad_token_id"] == 0


def test_run_reward_continues_a_reward_model(run, run_folders):
    run(num_train_epochs=3).rename(run_folders / "first")
    first = [json.loads(line) for line in (run_folders / "first" / "metrics.jsonl").read_text().splitlines()]
    again = run(model_name_or_path=run_folders / "first", max_steps=1, learning_rate=1e-6)
    (entry, *_) = [json.loads(line) for line in (again / "metrics.jsonl").read_text().splitlines()]
    assert entry["loss"] < first[0]["loss"] - 0.1


def test_run_reward_dry_run_and_preview_train_nothing(run, run_folders, capsys):
    run(dry_run="true")
    run(preview_data=1)
    printed = capsys.readouterr().out
    assert "Bradley-Terry" in printed and "optimizer steps" in printed and "pairs.jsonl:1" in printed
    assert not (run_folders / "out").exists()


def test_language_model_is_not_scored(run_folders):
    with pytest.raises(ValueError, match="is a language model, without a score head"):
        predict(run_folders, run_folders / "model")
