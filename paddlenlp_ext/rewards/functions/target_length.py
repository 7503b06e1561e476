"""Reward of a length: 0 at the target, and -1 at twice the target and beyond."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paddlenlp_ext.config.sections.rewards import RewardsConfig
from paddlenlp_ext.rewards.registry import REWARD_FUNCTIONS, RewardFunction, required


@REWARD_FUNCTIONS.register("target_length")
def target_length(config: RewardsConfig) -> RewardFunction:
    """Return the reward function for `reward_target_length` T: -min(1, |tokens - T| / T).

    Raises:
        ValueError: the key is unset.
    """
    target = required(config.reward_target_length, "reward_target_length", "target_length")

    def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [-min(1.0, abs(len(ids) - target) / target) for ids in completion_ids]

    return reward
