"""Model card of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from paddlenlp_ext.report.model_card import MARK, write_model_card

KEYS = {
    "model_name_or_path": "Qwen/Qwen3-0.6B",
    "dataset_name_or_path": "org/questions,checkpoints/mine",
    "learning_rate": 0.001,
    "lora_target_modules": [r".*\.q_proj"],
    "output_dir": "results",
    "data_cache_dir": "cache",
    "eval_dataset_path": {"dev": "customers.jsonl"},
    "lora_path": "/home/me/adapter",
    "some_note": "see /home/me",
    "tracker_api_key": "(hidden)",
}


def write_run(folder: Path, keys: dict[str, Any] = KEYS, kind: str = "sft", peft_type: str | None = "LORA") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    start: dict[str, Any] = {
        "kind": kind,
        "total_steps": 2,
        "changed_keys": {key: [value, None] for key, value in keys.items()},
    }
    start["environment"] = {"paddlepaddle": "3.3.1", "processor": "secret host"}
    start["command"] = ["pnx", "sft", "/home/me/run.json"]
    end = {"event": "end", "step": 2, "outcome": "completed"}
    lines = [{"event": "start", "step": 0, **start}, {"step": 2, "loss": 1.5, "num_tokens": 60, "seconds": 2}, end]
    (folder / "history.jsonl").write_text("".join(f"{json.dumps({'time': 0.0, **line})}\n" for line in lines))
    (folder / "run_config.json").write_text(json.dumps(keys))
    (folder / "all_results.json").write_text('{"train_loss": 1.25, "eval_loss": 1.125, "eval_runtime": 3.0}')
    if peft_type is not None:
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": peft_type}))
    return folder


def card_of(folder: Path, repo_id: str = "org/mine") -> str:
    write_model_card(folder, folder, repo_id)
    return (folder / "README.md").read_text()


def metadata_of(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def test_write_model_card_states_metadata_results_and_keys(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "checkpoints" / "mine", {})
    card = card_of(write_run(tmp_path / "run"))
    assert metadata_of(card) == {
        "base_model": "Qwen/Qwen3-0.6B",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["paddlepaddle", "sft", "lora"],
        "datasets": ["org/questions"],
    }
    assert "LORA adapter of `Qwen/Qwen3-0.6B`, from supervised fine-tuning" in card and "Completed: 2 steps." in card
    assert "| `train_loss` | 1.25 |\n| `eval_loss` | 1.125 |\n" in card and "eval_runtime" not in card
    assert "```bash\nhf download org/mine --local-dir mine\npnx chat mine\npnx serve mine\n```" in card
    shown = json.loads(card.split("```json\n")[1].split("```")[0])
    assert shown == {name: KEYS[name] for name in ("model_name_or_path", "learning_rate", "lora_target_modules")}
    assert "home" not in card and "customers" not in card and "secret" not in card


@pytest.mark.parametrize(
    ("kind", "peft_type", "base", "library", "task", "relation"),
    [
        ("dpo", None, "org/base", "transformers", "text-generation", "finetune"),
        ("reward", "LORA", "huggingface:org/base", "peft", "text-classification", "adapter"),
        ("sft", "MORA", "smollm2-135m-instruct", "paddlenlp_ext", "text-generation", None),
        ("sft", "LORA", "/models/base", "peft", "text-generation", None),
    ],
)
def test_write_model_card_metadata_fits_the_kind_of_model(tmp_path, kind, peft_type, base, library, task, relation):
    found = metadata_of(card_of(write_run(tmp_path, {"model_name_or_path": base}, kind, peft_type)))
    assert (found["library_name"], found["pipeline_tag"], found.get("base_model_relation")) == (library, task, relation)
    assert found.get("base_model") == ("org/base" if relation else None)


def test_write_model_card_rewrites_its_own_card_and_keeps_other_files(tmp_path: Path):
    write_run(tmp_path)
    assert "| `eval_f1`" not in card_of(tmp_path)
    (tmp_path / "all_results.json").write_text('{"eval_f1": 0.5}')
    card = card_of(tmp_path)
    assert "| `eval_f1` | 0.5 |" in card
    (tmp_path / "README.md").write_text(card.replace(MARK, "My words."))
    assert "My words." in card_of(tmp_path, "org/other")


def test_write_model_card_of_a_model_that_no_run_wrote_writes_nothing(tmp_path: Path):
    write_model_card(tmp_path, tmp_path, "org/mine")
    assert not list(tmp_path.iterdir())
