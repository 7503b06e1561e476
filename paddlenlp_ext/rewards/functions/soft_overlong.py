"""Penalty of long completions: DAPO's soft overlong punishment (arXiv:2503.14476, equation 13)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paddlenlp_ext.config.sections.rewards import RewardsConfig
from paddlenlp_ext.rewards.registry import REWARD_FUNCTIONS, RewardFunction, required


@REWARD_FUNCTIONS.register("soft_overlong")
def soft_overlong(config: RewardsConfig) -> RewardFunction:
    """Return the reward function for `overlong_max_length` and `overlong_buffer`.

    The reward is 0 up to `overlong_max_length - overlong_buffer` tokens, falls linearly to -1 at `overlong_max_length`,
    and is -1 beyond.

    Raises:
        ValueError: `overlong_max_length` is unset or smaller than the buffer.
    """
    longest = required(config.overlong_max_length, "overlong_max_length", "soft_overlong")
    buffer = config.overlong_buffer
    if buffer > longest:
        raise ValueError(f"overlong_buffer {buffer} exceeds overlong_max_length {longest}; lower overlong_buffer")

    def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [max(-1.0, min(0.0, (longest - buffer - len(ids)) / buffer)) for ids in completion_ids]

    return reward
