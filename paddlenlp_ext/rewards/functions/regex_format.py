"""Reward of a format: 1 for a completion that matches a regular expression from start to end, otherwise 0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from paddlenlp_ext.config.sections.rewards import RewardsConfig
from paddlenlp_ext.rewards.registry import REWARD_FUNCTIONS, RewardFunction, required, text_of


@REWARD_FUNCTIONS.register("regex_format")
def regex_format(config: RewardsConfig) -> RewardFunction:
    """Return the reward function for `reward_pattern`, in which a dot also matches a line break.

    Raises:
        ValueError: the pattern is unset or invalid.
    """
    text = required(config.reward_pattern, "reward_pattern", "regex_format")
    try:
        pattern = re.compile(text, re.DOTALL)
    except re.error as error:
        raise ValueError(f"reward_pattern: {text!r} is not a regular expression ({error}); correct it") from error

    def reward(completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(pattern.fullmatch(text_of(each)) is not None) for each in completions]

    return reward
