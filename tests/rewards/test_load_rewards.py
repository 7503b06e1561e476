"""Reward functions from a file, with names, weights and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddlenlp_ext.config.sections.rewards import RewardsConfig
from paddlenlp_ext.rewards.load_rewards import load_rewards
from paddlenlp_ext.rewards.score import score, total_rewards

CODE = """
def length(prompts, completions, completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]

def correct(completions, answer, **columns):
    return [None if expected is None else float(each == expected) for each, expected in zip(completions, answer)]

def short(**columns):
    return [1.0]

def hang(completions, **columns):
    while "c" in completions:
        pass
    return [1.0 for _ in completions]

def fail(completions, **columns):
    return [1 / (each != "c\\nd") for each in completions]

def leave(**columns):
    raise SystemExit(3)

def batch(completions, **columns):
    assert len(completions) == 1, "one at a time"
    return [1.0]

def value(completions, value, **columns):
    return value
"""


def _config(tmp_path: Path, *names: str, weights: object = None, **keys: Any) -> RewardsConfig:
    file = tmp_path / "my_rewards.py"
    file.write_text(CODE)
    return RewardsConfig(reward_funcs=tuple(f"{file}:{name}" for name in names), reward_weights=weights, **keys)


def test_score_of_two_functions_returns_a_column_for_each(tmp_path: Path) -> None:
    rewards = load_rewards(_config(tmp_path, "length", "correct", weights=[0.5, 2]))
    assert [(reward.name, reward.weight) for reward in rewards] == [("length", 0.5), ("correct", 2.0)]
    columns = {"answer": ["4", "5", None], "other": [1, 2, 3]}
    scores = score(rewards, ["p", "p", "p"], ["4", "4", "4"], [[1], [1, 2], [3, 4, 5]], columns)
    np.testing.assert_array_equal(scores, [[1, 1], [2, 0], [3, np.nan]])
    np.testing.assert_array_equal(total_rewards(scores, rewards), [2.5, 1.0, 1.5])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", "returned 1 values for 3 completions, from d:1, answer 'a'; return one number"),
        ("fail", r"raised ZeroDivisionError: division by zero for d:2, answer 'c\\nd'; correct"),
        ("leave", "raised SystemExit: 3 for d:1, answer 'a'"),
        ("hang", "took more than 0.2 seconds for d:3, answer 'c'; correct the function, or raise reward_time_limit"),
        ("batch", "raised AssertionError: one at a time for 3 completions, from d:1, answer 'a'"),
    ],
)
def test_score_with_a_failing_function_names_function_row_and_answer(tmp_path: Path, name: str, message: str) -> None:
    rewards = load_rewards(_config(tmp_path, "length", name, reward_time_limit=0.2))
    with pytest.raises(ValueError, match=f"reward function {name} {message}") as caught:
        score(rewards, ["p"] * 3, ["a", "c\nd", "c"], [[1], [2], [3]], {}, ["d:1", "d:2", "d:3"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1.0", [1.0], object])
def test_score_with_a_value_that_is_not_a_number_names_the_answer(tmp_path: Path, value: Any) -> None:
    rewards = load_rewards(_config(tmp_path, "value"))
    long = "b" * 200
    with pytest.raises(
        ValueError, match=r"reward function value returned .* for completion 2, answer 'b{76}\.\.\.; return"
    ):
        score(rewards, ["p"] * 2, ["a", long], [[1], [2]], {"value": [True, value]})


@pytest.mark.parametrize("weights", [[1], "1,x", [1, 2, 3], "1,nan", 3])
def test_wrong_reward_weights_are_an_error(tmp_path: Path, weights: object) -> None:
    with pytest.raises(ValueError, match="is not a list of 2 numbers"):
        load_rewards(_config(tmp_path, "length", "correct", weights=weights))


def test_two_functions_with_one_name_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two functions have the name length"):
        load_rewards(_config(tmp_path, "length", "length"))
