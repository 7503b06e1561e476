"""Import the user's functions and classes that the keys `compute_metrics`, `callbacks` and `reward_funcs` name."""

from __future__ import annotations

from collections.abc import Mapping

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.rewards.load_rewards import load_rewards
from paddlenlp_ext.rewards.registry import RewardFunction
from paddlenlp_ext.trainer.callbacks.load_callbacks import load_callbacks
from paddlenlp_ext.trainer.metrics.custom_metrics import load_compute_metrics


def import_dotted_paths(config: RunConfig, reward_functions: Mapping[str, RewardFunction] | None = None) -> None:
    """Import the user's code before data and weights are loaded, so that a wrong path is found early.

    Args:
        config: configuration of the run.
        reward_functions: see `load_rewards`.

    Raises:
        ValueError: a module cannot be imported, or does not define the function or class.
    """
    load_compute_metrics(config.generation.compute_metrics)
    load_callbacks(config.train.callbacks)
    if config.rewards is not None:
        load_rewards(config.rewards, reward_functions)
