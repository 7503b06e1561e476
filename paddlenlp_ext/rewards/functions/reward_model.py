"""Reward of a model that `pnx reward` trained."""

from __future__ import annotations

from paddlenlp_ext.config.sections.rewards import RewardsConfig
from paddlenlp_ext.rewards.registry import REWARD_FUNCTIONS, RewardFunction, required
from paddlenlp_ext.utils.import_by_path import import_by_path

_FUNCTION = "paddlenlp_ext.evaluation.reward_model_function.ModelReward"
"""Named, not imported: models are loaded in a higher layer than this package."""


@REWARD_FUNCTIONS.register("reward_model")
def reward_model(config: RewardsConfig) -> RewardFunction:
    """Return the reward function for the model in `reward_model_name_or_path`.

    Raises:
        ValueError: the key is unset, or the folder does not have a reward model.
    """
    folder = required(config.reward_model_name_or_path, "reward_model_name_or_path", "reward_model")
    return import_by_path(_FUNCTION, "reward_funcs")(folder)
