"""Registry of the built-in reward functions. Each module in `rewards.functions` registers one function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paddlenlp_ext.config.sections.rewards import RewardsConfig
from paddlenlp_ext.utils.registry import Registry

RewardFunction = Callable[..., Sequence[float | None]]
"""Function with the interface of TRL (load_rewards.py)."""
REWARD_FUNCTIONS: Registry[Callable[[RewardsConfig], RewardFunction]] = Registry(
    "reward function", "paddlenlp_ext.rewards.functions"
)
"""Name of a built-in function -> function that returns it with the options of a run."""


def text_of(completion: str | Sequence[dict[str, Any]]) -> str:
    """Return the text of a completion: a string, or the content of the last message of a list."""
    return completion if isinstance(completion, str) else completion[-1]["content"] or ""


def column_of(columns: dict[str, Sequence[Any]], name: str, key: str) -> Sequence[Any]:
    """Return the values of a field of the rows, one for each completion.

    Raises:
        ValueError: no row has the field; the message names the key that sets the name of the field.
    """
    if name not in columns:
        raise ValueError(f"no row has the field {name}; set {key} to one of: {', '.join(sorted(columns)) or 'none'}")
    return columns[name]


def required(value: Any, key: str, function: str) -> Any:
    """Return the value of a key that a function needs.

    Raises:
        ValueError: the value is None.
    """
    if value is None:
        raise ValueError(f"reward_funcs: {function} needs the key {key}; set it")
    return value
