"""Score completions with reward functions.

Shapes: N completions, F reward functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paddlenlp_ext.rewards.load_rewards import Reward


def score(
    rewards: Sequence[Reward],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
) -> np.ndarray:
    """Return the reward of each completion by each function, float64 [N, F]; NaN: the function does not apply.

    Args:
        rewards: reward functions.
        prompts: prompt of each completion.
        completions: completions, in the form that `load_rewards.py` describes.
        completion_ids: token ids of each completion.
        columns: column of the rows -> value for each completion.

    Raises:
        ValueError: a function returns a list of another length, or a value that is not a number.
    """
    scores_NF = np.empty([len(completions), len(rewards)], np.float64)
    for index, reward in enumerate(rewards):
        values = list(
            reward.function(
                prompts=list(prompts),
                completions=list(completions),
                completion_ids=[list(ids) for ids in completion_ids],
                **{name: list(column) for name, column in columns.items()},
            )
        )
        if len(values) != len(completions):
            raise ValueError(
                f"reward function {reward.name} returned {len(values)} values for {len(completions)} completions; "
                "return one number per completion"
            )
        scores_NF[:, index] = [np.nan if value is None else value for value in values]
    return scores_NF


def total_rewards(scores_NF: np.ndarray, rewards: Sequence[Reward]) -> np.ndarray:
    """Return the weighted sum of the rewards of each completion, float64 [N]; NaN if no function applies to it."""
    sums_N = np.nansum(scores_NF * np.array([reward.weight for reward in rewards]), axis=1)
    return np.where(np.isnan(scores_NF).all(axis=1), np.nan, sums_N)
