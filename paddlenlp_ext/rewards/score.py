"""Score completions with reward functions.

Shapes: N completions, F reward functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddlenlp_ext.rewards.load_rewards import Reward
from paddlenlp_ext.rewards.registry import text_of
from paddlenlp_ext.utils.time_limit import TimeLimitError, time_limit

_MAX_SHOWN = 80
"""Maximum number of characters of a completion in an error message."""


def score(
    rewards: Sequence[Reward],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
    rows: Sequence[str] | None = None,
) -> np.ndarray:
    """Return the reward of each completion by each function, float64 [N, F]; NaN: the function does not apply.

    If a function fails, it is called again with each completion alone, to name the completion in the error.

    Args:
        rewards: reward functions.
        prompts: prompt of each completion.
        completions: completions, in the form that `load_rewards.py` describes.
        completion_ids: token ids of each completion.
        columns: column of the rows -> value for each completion.
        rows: location of the row of each completion, for error messages; None: its number.

    Raises:
        ValueError: a function raises an exception, exceeds its time limit, returns a list of another length, or returns
            a value that is not a finite number.
    """
    places = [f"completion {number}" for number in range(1, len(completions) + 1)] if rows is None else rows
    batch = _Completions(prompts, completions, completion_ids, columns, places)
    columns_FN = [batch.rewards(reward) for reward in rewards]
    return np.array(columns_FN, np.float64).reshape(len(rewards), len(completions)).T


@dataclass(frozen=True)
class _Completions:
    """Completions to score; the attributes are the arguments of `score`."""

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]
    places: Sequence[str]

    def rewards(self, reward: Reward) -> list[float]:
        """Return the rewards by one function; see `score`."""
        try:
            values = self._call(reward)
        except (Exception, SystemExit, TimeLimitError) as error:
            raise ValueError(self._explain_failure(reward, error)) from error
        if len(values) != len(self.completions):
            raise ValueError(
                f"reward function {reward.name} returned {len(values)} values for {len(self.completions)} completions, "
                f"from {self._shown(0)}; return one number or None per completion"
            )
        return [self._number(reward, index, value) for index, value in enumerate(values)]

    def _call(self, reward: Reward) -> list[Any]:
        with time_limit(reward.time_limit):
            return list(
                reward.function(
                    prompts=list(self.prompts),
                    completions=list(self.completions),
                    completion_ids=[list(ids) for ids in self.completion_ids],
                    **{name: list(column) for name, column in self.columns.items()},
                )
            )

    def _explain_failure(self, reward: Reward, error: BaseException) -> str:
        """Return the error message about the first completion with which the function fails alone, else about all."""
        where = f"{len(self.completions)} completions, from {self._shown(0)}"
        for index in range(len(self.completions)):
            try:
                self._only(index)._call(reward)
            except (Exception, SystemExit, TimeLimitError) as own:
                error, where = own, self._shown(index)
                break
        if isinstance(error, TimeLimitError):
            return (
                f"reward function {reward.name} took more than {reward.time_limit:g} seconds for {where}; correct the "
                "function, or raise reward_time_limit"
            )
        reason = _one_line(f"{type(error).__name__}: {error}", 200)
        return f"reward function {reward.name} raised {reason} for {where}; correct the function or the row"

    def _only(self, index: int) -> _Completions:
        own = slice(index, index + 1)
        columns = {name: column[own] for name, column in self.columns.items()}
        return _Completions(
            self.prompts[own], self.completions[own], self.completion_ids[own], columns, self.places[own]
        )

    def _number(self, reward: Reward, index: int, value: Any) -> float:
        if value is None:
            return math.nan
        try:
            number = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(
                f"reward function {reward.name} returned {_one_line(repr(value), 40)} for {self._shown(index)}; return "
                "a finite number, or None where the function does not apply"
            )
        return number

    def _shown(self, index: int) -> str:
        """Return the place and the beginning of a completion."""
        return f"{self.places[index]}, answer {_one_line(repr(text_of(self.completions[index])), _MAX_SHOWN)}"


def _one_line(text: str, length: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 3]}..."


def total_rewards(scores_NF: np.ndarray, rewards: Sequence[Reward]) -> np.ndarray:
    """Return the weighted sum of the rewards of each completion, float64 [N]; NaN if no function applies to it."""
    sums_N = np.nansum(scores_NF * np.array([reward.weight for reward in rewards]), axis=1)
    return np.where(np.isnan(scores_NF).all(axis=1), np.nan, sums_N)
