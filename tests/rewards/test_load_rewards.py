"""Reward functions from a file, with names, weights and errors."""

from __future__ import annotations

from pathlib import Path

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
"""


def _config(tmp_path: Path, *names: str, weights: object = None) -> RewardsConfig:
    file = tmp_path / "my_rewards.py"
    file.write_text(CODE)
    return RewardsConfig(reward_funcs=tuple(f"{file}:{name}" for name in names), reward_weights=weights)


def test_score_of_two_functions_returns_a_column_for_each(tmp_path: Path) -> None:
    rewards = load_rewards(_config(tmp_path, "length", "correct", weights=[0.5, 2]))
    assert [(reward.name, reward.weight) for reward in rewards] == [("length", 0.5), ("correct", 2.0)]
    columns = {"answer": ["4", "5", None], "other": [1, 2, 3]}
    scores = score(rewards, ["p", "p", "p"], ["4", "4", "4"], [[1], [1, 2], [3, 4, 5]], columns)
    np.testing.assert_array_equal(scores, [[1, 1], [2, 0], [3, np.nan]])
    np.testing.assert_array_equal(total_rewards(scores, rewards), [2.5, 1.0, 1.5])


def test_score_with_a_missing_value_names_the_function(tmp_path: Path) -> None:
    rewards = load_rewards(_config(tmp_path, "short"))
    with pytest.raises(ValueError, match="reward function short returned 1 values for 2 completions"):
        score(rewards, ["p", "p"], ["a", "b"], [[1], [2]], {})


@pytest.mark.parametrize("weights", [[1], "1,x", [1, 2, 3], "1,nan", 3])
def test_wrong_reward_weights_are_an_error(tmp_path: Path, weights: object) -> None:
    with pytest.raises(ValueError, match="is not a list of 2 numbers"):
        load_rewards(_config(tmp_path, "length", "correct", weights=weights))


def test_two_functions_with_one_name_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two functions have the name length"):
        load_rewards(_config(tmp_path, "length", "length"))
