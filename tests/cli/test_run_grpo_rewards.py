"""Program run_grpo.py with built-in reward functions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paddlenlp_ext import AutoModelForSequenceClassification, AutoTokenizer
from paddlenlp_ext.cli.run_finetune import run_finetune
from paddlenlp_ext.config.run_config import GRPO_SECTIONS


def run(folder: Path, **keys: object) -> None:
    prompts = [{"prompt": f"{word} fig", "answer": "fig"} for word in ("red", "blue", "lime", "plum")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    keys = {
        "model_name_or_path": folder / "model",
        "train_dataset_path": folder / "prompts.jsonl",
        "output_dir": folder / "out",
        "chat_template": "none",
        **dict.fromkeys(("do_train", "disable_tqdm"), "true"),
        "num_generations": 2,
        "per_device_train_batch_size": 4,
        "max_completion_length": 4,
        "max_steps": 2,
        "logging_steps": 1,
        "device": "cpu",
        **keys,
    }
    run_finetune(
        [word for key, value in keys.items() for word in (f"--{key}", str(value))], GRPO_SECTIONS, "run_grpo.py"
    )


def test_run_grpo_logs_each_built_in_function(run_folders: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(run_folders / "model").save_pretrained(run_folders / "reward")
    AutoTokenizer.from_pretrained(run_folders / "model").save_pretrained(run_folders / "reward")
    names = ("exact_answer", "target_length", "reward_model")
    keys = {"reward_target_length": 8, "reward_model_name_or_path": run_folders / "reward"}
    run(run_folders, reward_funcs=",".join(names), reward_weights="1,2,0", **keys)
    lines = [json.loads(line) for line in (run_folders / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == 2
    for step in steps:
        means = [step[f"rewards/{name}/mean"] for name in names]
        assert -1 <= means[1] <= -0.5 and abs(means[2]) > 0
        assert step["reward"] == pytest.approx(means[0] + 2 * means[1], abs=1e-5)


def test_run_grpo_with_a_failing_function_names_row_and_answer(run_folders: Path) -> None:
    (run_folders / "rewards.py").write_text(
        "def bad(prompts, **columns):\n    return [1 / (p != 'lime fig') for p in prompts]\n"
    )
    with pytest.raises(ValueError, match=r"function bad raised ZeroDivisionError: .* for .*prompts.jsonl:3, answer '"):
        run(run_folders, reward_funcs=f"{run_folders}/rewards.py:bad")
