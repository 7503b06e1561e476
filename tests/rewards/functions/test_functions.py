"""Built-in reward functions: values, and errors in their keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paddlenlp_ext.config.sections.rewards import RewardsConfig
from paddlenlp_ext.rewards.load_rewards import load_rewards
from paddlenlp_ext.rewards.registry import REWARD_FUNCTIONS


def rewards_of(name: str, completions: list[Any], columns: dict[str, list[Any]] | None = None, **keys: Any) -> list:
    """Return the rewards of one function for completions; the number of tokens is the number of words."""
    (reward,) = load_rewards(RewardsConfig(reward_funcs=(name,), **keys))
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    ids = [list(range(len(text.split()))) for text in texts]
    prompts = ["p"] * len(completions)
    return list(reward.function(prompts=prompts, completions=completions, completion_ids=ids, **(columns or {})))


def test_exact_answer_reads_the_column_and_messages() -> None:
    completions = ["#### 4", [{"role": "assistant", "content": r"\boxed{5}"}], "4", "4"]
    columns = {"right": ["4", 4, None, [4]], "answer": ["0", "0", "0", "0"]}
    expected = [1.0, 0.0, None, 0.0]
    assert rewards_of("exact_answer", completions, columns, reward_answer_column="right") == expected


def test_exact_answer_without_its_column_lists_the_columns() -> None:
    with pytest.raises(ValueError, match="no row has the field answer; set reward_answer_column to one of: a, b"):
        rewards_of("exact_answer", ["4"], {"b": ["4"], "a": ["4"]})


def test_regex_format_matches_from_start_to_end_across_lines() -> None:
    completions = ["<think>\na\n</think> b", " <think>a</think> b", "<think>a</think> b\n"]
    assert rewards_of("regex_format", completions, reward_pattern=r"<think>.*</think> \w") == [1.0, 0.0, 0.0]


def test_json_format_checks_syntax_and_schema(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    completions = ['{"b": 1, "a": 2}\n', '{"a": 1.5}', '{"a": 1', "[1]", '{"a": 1, "b": NaN}', "[" * 100_000, ""]
    assert rewards_of("json_format", completions, reward_json_schema=str(file)) == [1.0, *[0.0] * 6]
    file.write_text('{"type": "integr"}')
    with pytest.raises(ValueError, match=r"schema.json is not a JSON schema: 'integr'"):
        rewards_of("json_format", completions, reward_json_schema=str(file))


def test_target_length_falls_linearly_on_both_sides() -> None:
    completions = ["a " * 4, "a " * 3, "a " * 5, "", "a " * 9]
    assert rewards_of("target_length", completions, reward_target_length=4) == [0.0, -0.25, -0.25, -1.0, -1.0]


def test_soft_overlong_has_the_values_of_dapos_formula() -> None:
    """With L_max 10 and L_cache 4: 0 up to 6 tokens, ((10 - 4) - tokens) / 4 up to 10 tokens, and then -1."""
    completions = ["a " * length for length in (0, 6, 7, 9, 10, 11, 30)]
    values = rewards_of("soft_overlong", completions, overlong_max_length=10, overlong_buffer=4)
    assert values == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("regex_format", {}, "regex_format needs the key reward_pattern; set it"),
        ("regex_format", {"reward_pattern": "("}, r"reward_pattern: '\(' is not a regular expression"),
        ("json_format", {}, "json_format needs the key reward_json_schema"),
        ("target_length", {}, "target_length needs the key reward_target_length"),
        ("soft_overlong", {}, "soft_overlong needs the key overlong_max_length"),
        ("soft_overlong", {"overlong_max_length": 9}, "overlong_buffer 256 exceeds overlong_max_length 9"),
        ("reward_model", {}, "reward_model needs the key reward_model_name_or_path"),
        ("run_code", {}, "set reward_run_code to true"),
        ("exact_anser", {}, r"unknown reward function 'exact_anser'.*exact_answer"),
    ],
)
def test_reward_functions_with_a_wrong_key_name_it(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_rewards(RewardsConfig(reward_funcs=(name,), **keys))


def test_registry_has_one_module_per_function() -> None:
    names = [
        "exact_answer",
        "json_format",
        "regex_format",
        "reward_model",
        "run_code",
        "soft_overlong",
        "target_length",
    ]
    assert REWARD_FUNCTIONS.names() == names
