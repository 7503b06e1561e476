"""YAML files: the core schema of YAML 1.2, and the location of every kind of mistake."""

from __future__ import annotations

from typing import Any

import pytest

from paddlenlp_ext.config.config_files import read_text
from paddlenlp_ext.config.yaml_settings import MAX_DEPTH
from tests.config.config_cases import SMALLEST, load, problems, write

VALUES: dict[str, Any] = {
    "3e-4": 3e-4,
    "1.": 1.0,
    "-.5": -0.5,
    "010": 10,
    "0x1F": 31,
    "0o17": 15,
    "+7": 7,
    "1_000": "1_000",
    "1:30": "1:30",
    "2024-01-01": "2024-01-01",
    "true": True,
    "False": False,
    "no": "no",
    "yes": "yes",
    "on": "on",
    "~": None,
    "null": None,
    "": None,
    "'3'": "3",
    '"true"': "true",
    "C:\\data": "C:\\data",
    "[1, q_proj, 2.5]": [1, "q_proj", 2.5],
    "{math: a.jsonl, code: null}": {"math": "a.jsonl", "code": None},
    "\n  - q\n  - k": ["q", "k"],
    "|\n  a\n  b": "a\nb",
    "1 # why": 1,
}


@pytest.mark.parametrize("written", VALUES)
def test_read_text_types_values_by_yaml_1_2(written: str):
    (setting,), found = read_text(f"key: {written}", "run.yaml")
    assert found == []
    assert setting.value == VALUES[written] and type(setting.value) is type(VALUES[written])


# text, line, column, words of the message
BROKEN = {
    "": (1, 1, "empty"),
    "# nothing": (1, 10, "empty"),
    "lora": (1, 1, "`key: value`"),
    "- lora": (1, 1, "`key: value`"),
    "seed:1": (1, 1, "`key: value`"),
    "seed: 1\n\tlora: true": (2, 1, "spaces"),
    "lora_target_modules:\n\t- q": (2, 1, "spaces"),
    "seed: 1\n---\nseed: 2": (3, 1, "second document"),
    "a: &x [1]\nb: [*x, *x]": (2, 5, "aliases"),
    "a: !!python/object/apply:os.getcwd []": (1, 4, "tags"),
    "!!str a: 1": (1, 1, "tags"),
    "? [a]\n: 1": (1, 3, "a key must be a string"),
    "learning_rate: .nan": (1, 16, "finite"),
    "learning_rate: 1e999": (1, 16, "finite"),
    "seed: " + "9" * 301: (1, 7, "301 digits"),
    "eval_dataset_path: {a: 1, a: 2}": (1, 27, "duplicate key 'a'"),
    "output_dir: a: b": (1, 14, "':'"),
    "output_dir: 'a": (1, 15, "closing quote"),
    'output_dir: "C:\\data"': (1, 17, "backslash"),
    "output_dir: @a": (1, 13, "quotes"),
    "lora_target_modules: [q, k": (1, 27, "ends inside"),
    "seed: \x07": (1, 7, "U+0007"),
    "a: " + "[" * 20_000: (1, 4 + MAX_DEPTH - 1, "nested"),
}


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: repr(text[:24]))
def test_read_text_with_broken_yaml_locates_it(text: str):
    _, (found,) = read_text(text, "run.yml")
    line, column, words = BROKEN[text]
    assert (found.line, found.column) == (line, column), found
    assert found.message.startswith("not valid YAML: ") and words in found.message


def test_read_text_with_a_duplicate_key_in_yaml_locates_it():
    _, (found,) = read_text('seed: 1\nlora: true\n"seed": 2', "run.yaml")
    assert str(found) == "run.yaml:3:1: duplicate key 'seed', first on line 1; keep one"


def test_load_run_config_reads_yaml_as_json(tmp_path):
    smallest = "\n".join(f"{key}: {str(value).lower()}" for key, value in SMALLEST.items())
    text = f"\ufeff$schema: sft.schema.json\n{smallest}\nlearning_rate: 3e-4\n"
    json_config = load(write(tmp_path, SMALLEST | {"learning_rate": 3e-4}))
    assert load(write(tmp_path, text, "run.yaml")) == json_config


def test_load_run_config_with_a_wrong_value_in_yaml_locates_it(tmp_path):
    path = write(tmp_path, "model_name_or_path: a\ndo_train: no\nlora_rnk: 3", "run.yaml")
    found = [str(problem) for problem in problems(path)]
    assert f'{path}:2:11: do_train: expected true or false, got "no"; write false without quotes' in found
    assert f"{path}:3:1: unknown key 'lora_rnk'; did you mean 'lora_rank'?" in found
