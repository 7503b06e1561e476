"""Reward of a correct answer: 1 if the final answer of a completion equals the answer of its row, otherwise 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paddlenlp_ext.config.sections.rewards import RewardsConfig
from paddlenlp_ext.rewards.final_answer import is_correct
from paddlenlp_ext.rewards.registry import REWARD_FUNCTIONS, RewardFunction, column_of, text_of


@REWARD_FUNCTIONS.register("exact_answer")
def exact_answer(config: RewardsConfig) -> RewardFunction:
    """Return the reward function for the answers in `reward_answer_column`; null: the function does not apply."""
    name = config.reward_answer_column

    def reward(completions: Sequence[Any], **columns: Sequence[Any]) -> list[float | None]:
        answers = column_of(columns, name, "reward_answer_column")
        pairs = zip(completions, answers, strict=True)
        return [None if answer is None else float(is_correct(text_of(each), answer)) for each, answer in pairs]

    return reward
