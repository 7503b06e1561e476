"""Load the reward functions that the keys `reward_funcs` and `reward_weights` name.

A reward function is built in (`rewards/functions`), or has the interface of TRL:

    def correct(prompts, completions, completion_ids, answer, **columns):      # my_rewards.py
        return [float(each == expected) for each, expected in zip(completions, answer)]

    "reward_funcs": ["my_rewards.correct"]       or       "reward_funcs": ["my_rewards.py:correct"]

`prompts` and `completions` are lists of strings, or of lists of messages if the rows have messages. `completion_ids` is
a list of lists of token ids. The other columns of the rows are keyword arguments. The result is a list with one number
per completion; None: the function does not apply to the completion.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paddlenlp_ext.config.sections.rewards import RewardsConfig
from paddlenlp_ext.rewards.registry import REWARD_FUNCTIONS, RewardFunction
from paddlenlp_ext.utils.import_by_path import import_by_path


@dataclass(frozen=True)
class Reward:
    """Reward function.

    Attributes:
        name: name in logs.
        weight: weight in the total reward.
        function: the function.
        time_limit: maximum time of a call in seconds; None: the function limits its time itself.
    """

    name: str
    weight: float
    function: RewardFunction
    time_limit: float | None


def load_rewards(config: RewardsConfig, given: Mapping[str, RewardFunction] | None = None) -> list[Reward]:
    """Return the reward functions of a run, in the order of `reward_funcs`.

    Args:
        config: `config.rewards` of a run.
        given: functions in memory, by their entry in `reward_funcs`; other entries are imported.

    Raises:
        ValueError: a function is unknown, cannot be imported or lacks a key, two functions have the same name, or the
            number of weights is wrong.
    """
    paths = config.reward_funcs
    names, weights = _distinct(config.reward_names), _weights(config.reward_weights, len(paths))
    functions = [given[path] if given and path in given else _load(path, config) for path in paths]
    limits = [None if getattr(each, "limits_time", False) else config.reward_time_limit for each in functions]
    return [Reward(*each) for each in zip(names, weights, functions, limits, strict=True)]


def _weights(written: object, count: int) -> list[float]:
    """Return the weights that a list, or a string of numbers separated by commas, gives; None: 1 for each function."""
    if written is None:
        return [1.0] * count
    listed = written.split(",") if isinstance(written, str) else written
    try:
        weights = [float(weight) for weight in listed]  # pyrefly: ignore
    except (TypeError, ValueError):
        weights = []
    if len(weights) != count or not all(map(math.isfinite, weights)):
        raise ValueError(
            f"reward_weights: {written!r} is not a list of {count} numbers; write one number for each of reward_funcs"
        )
    return weights


def _distinct(names: Sequence[str]) -> Sequence[str]:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"reward_funcs: two functions have the name {name}; rename one of them")
    return names


def _load(path: str, config: RewardsConfig) -> RewardFunction:
    if path.isidentifier():
        try:
            make = REWARD_FUNCTIONS.get(path)
        except ValueError as error:
            raise ValueError(
                f"reward_funcs: {error} Your own function is module.function or file.py:function"
            ) from None
        return make(config)
    function = import_by_path(path, "reward_funcs")
    if not callable(function):
        raise ValueError(f"reward_funcs: {path} is not a function; name a function")
    return function
