"""JSON keys of prefix tuning, prompt tuning and bottleneck adapters reach their configs and round-trip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paddlenlp_ext.config import ConfigError, load_run_config
from paddlenlp_ext.config.known_keys import known_keys
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.methods.bottleneck import BottleneckConfig
from paddlenlp_ext.peft.methods.prefix_tuning import PrefixTuningConfig
from paddlenlp_ext.peft.methods.prompt_tuning import PromptTuningConfig
from paddlenlp_ext.peft.registry import peft_methods

CASES: list[tuple[dict[str, Any], PeftConfig]] = [
    (
        {
            "prefix_tuning": True,
            "num_prefix_tokens": 9,
            "prefix_init": "random",
            "prefix_projection": True,
            "prefix_projection_hidden_size": 64,
            "prefix_dropout": 0.1,
            "prefix_path": "start",
        },
        PrefixTuningConfig(
            num_tokens=9, init="random", projection=True, projection_hidden_size=64, dropout=0.1, path="start"
        ),
    ),
    (
        {
            "prompt_tuning": True,
            "prompt_tuning_num_tokens": 9,
            "prompt_tuning_init": "text",
            "prompt_tuning_init_text": "Answer:",
            "prompt_tuning_tokenizer_name_or_path": "tokenizer",
            "prompt_tuning_path": "start",
        },
        PromptTuningConfig(
            num_tokens=9, init="text", init_text="Answer:", tokenizer_name_or_path="tokenizer", path="start"
        ),
    ),
    (
        {
            "adapter": True,
            "adapter_size": 9,
            "adapter_where": "mlp",
            "adapter_kind": "parallel",
            "adapter_activation": "relu",
            "adapter_scale": 4.0,
            "adapter_dropout": 0.1,
            "adapter_path": "start",
        },
        BottleneckConfig(size=9, where="mlp", kind="parallel", activation="relu", scale=4.0, dropout=0.1, path="start"),
    ),
]
names = pytest.mark.parametrize(
    ("keys", "expected"), CASES, ids=lambda value: next(iter(value), "") if type(value) is dict else ""
)


def load(folder: Path, keys: dict[str, Any]) -> Any:
    file = folder / "run.json"
    run = {"model_name_or_path": "m", "dataset_name_or_path": "d", "output_dir": str(folder / "out"), "do_train": True}
    file.write_text(json.dumps({**run, **keys}))
    return load_run_config([str(file)], peft_methods())


@names
def test_prefix_prompt_json_keys_reach_config_and_round_trip(
    keys: dict[str, Any], expected: PeftConfig, tmp_path: Path
):
    config = load(tmp_path, keys)
    assert config.peft == expected
    flat, spellings = config.to_flat_dict(), known_keys(peft_methods()).keys
    assert {key: flat[spellings[key]] for key in keys} == keys
    assert load(tmp_path, {spellings[key]: value for key, value in keys.items()}).peft == expected


@names
def test_prefix_prompt_json_defaults_equal_config_class(keys: dict[str, Any], expected: PeftConfig, tmp_path: Path):
    assert load(tmp_path, {next(iter(keys)): True}).peft == type(expected)()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"prefix_tuning": True, "num_prefix_tokens": 0}, "num_prefix_tokens: 0 is out of range"),
        ({"prefix_tuning": True, "prefix_init": "zero"}, "prefix_init"),
        ({"prompt_tuning": True, "prompt_tuning_init": "text"}, "to 'text' and pass a text"),
        ({"adapter": True, "adapter_where": "head"}, "adapter_where"),
        ({"adapter": True, "prefix_tuning": True}, "several adapter methods are on: adapter, prefix_tuning"),
    ],
)
def test_prefix_prompt_wrong_json_values_are_reported(keys: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, keys)
    assert message in str(raised.value)
