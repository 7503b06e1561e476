"""Configuration section for the reward functions of sampled completions."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext.config.dataclass_options import OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class RewardsConfig(OptionGroup):
    """`config.rewards`: functions that score completions, with the names of the keys in TRL."""

    reward_funcs: tuple[str, ...] = option(
        (), help="functions that score completions: module.function or file.py:function (docs/grpo.md)"
    )
    reward_weights: object = option(
        None, help="list with the weight of each reward function in the total reward; unset: 1 for each"
    )
