"""JSON keys of LoRA reach LoRAConfig."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paddlenlp_ext.config import ConfigError, load_run_config
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.registry import peft_methods


def load(folder: Path, *arguments: str, **keys: object) -> LoRAConfig | None:
    file = folder / "run.json"
    run = {"model_name_or_path": "m", "dataset_name_or_path": "d", "output_dir": str(folder / "out"), "do_train": True}
    file.write_text(json.dumps({**run, **keys}))
    return load_run_config([str(file), *arguments], peft_methods()).peft


def test_lora_json_keys_reach_config(tmp_path: Path):
    keys = {
        "lora_rank": 4,
        "lora_alpha": 9,
        "lora_dropout": 0.1,
        "lora_target_modules": [".*q_proj.*", "v_proj"],
        "lora_path": "start",
        "rslora": True,
        "lora_plus_scale": 2.5,
        "init_lora_weights": "gaussian",
        "lora_bias": True,
        "lora_trainable_bias": "lora_only",
        "lora_modules_to_save": ["lm_head"],
        "lora_exclude_modules": "down_proj",
    }
    expected = LoRAConfig(
        rank=4,
        alpha=9,
        dropout=0.1,
        target_modules=(".*q_proj.*", "v_proj"),
        path="start",
        rslora=True,
        plus_scale=2.5,
        init_a="gaussian",
        lora_bias=True,
        trainable_bias="adapted",
        modules_to_save=("lm_head",),
        exclude_modules=("down_proj",),
    )
    assert load(tmp_path, lora=True, **keys) == expected


def test_lora_defaults_follow_rank(tmp_path: Path):
    assert load(tmp_path) is None
    assert load(tmp_path, lora=True).alpha == 16
    assert load(tmp_path, lora=True, lora_rank=32).alpha == 64
    assert load(tmp_path, lora=True, lora_rank=32, rslora=True).alpha == 4
    assert load(tmp_path, "--lora", "--lora_target_modules", "q_proj").target_modules == ("q_proj",)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lora_rank": 0}, "lora_rank: 0 is out of range"),
        ({"lora_rank": 2.5}, "lora_rank: expected a whole number"),
        ({"lora_dropout": 1}, "lora_dropout: 1"),
        ({"lora_plus_scale": -1}, "lora_plus_scale: -1"),
        ({"lora_target_modules": 3}, "lora_target_modules: expected"),
        ({"lora_rnk": 3}, "unknown key 'lora_rnk'; did you mean 'lora_rank'"),
    ],
)
def test_lora_wrong_json_values_are_reported(keys: dict, message: str, tmp_path: Path):
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, lora=True, **keys)
    assert message in str(raised.value)


def test_lora_key_unused_by_variant_is_reported(tmp_path: Path):
    keys = {"lora": True, "use_mora": True, "lora_alpha": 9}
    load(tmp_path, **keys)
    file = tmp_path / "run.json"
    notes = load_run_config([str(file)], peft_methods()).notes
    assert any(note.startswith("lora_alpha has no effect: use_mora does not use it") for note in notes)


def test_target_parameters_reach_config_and_are_noted_for_other_methods(tmp_path: Path):
    keys = {"lora_target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}
    expected = LoRAConfig(target_modules=(), target_parameters=("mlp.experts.down_proj",))
    assert load(tmp_path, lora=True, **keys) == expected
    run = json.loads((tmp_path / "run.json").read_text())
    del run["lora"], run["lora_target_modules"]
    (tmp_path / "run.json").write_text(json.dumps({**run, "vera": True}))
    notes = load_run_config([str(tmp_path / "run.json")], peft_methods()).notes
    assert any(note.startswith("target_parameters has no effect: lora is false") for note in notes)
    with pytest.raises(ConfigError, match="target_parameters is not available: variants of LoRA do not have"):
        load(tmp_path, lora=True, pissa=True, **keys)
