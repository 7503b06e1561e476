"""Configuration section for training a reward model (`llm/run_reward.py`): options of the loss."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext.config.dataclass_options import OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class RewardConfig(OptionGroup):
    """`config.reward`: the loss of a reward model; the keys have the same names as in TRL and PaddleNLP."""

    center_rewards_coefficient: float = option(
        0.0, minimum=0, help="weight of the squared sum of a pair's rewards, which centers rewards at 0"
    )
    regularization: float = option(0.0, minimum=0, help="weight of the mean square of a pair's rewards")
    share_prompt: bool = option(
        True, help="compute the prompt of a pair once for both answers; false: once for each answer"
    )
