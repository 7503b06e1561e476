"""A group of sampled completions of a prompt, and files with a group in each line.

    {"prompt_ids": [1, 9], "completion_ids": [[5, 2], [7, 8]], "old_logps": [[-0.3, -0.1], [-1.2, -0.4]],
     "rewards": [1.0, 0.0]}

`rewards` has one total reward per completion; null: no reward. Runs also write `row`, the index of the row in the
dataset, `scores`, the rewards of each reward function, and `sampling_logps`, if the log-probabilities in sampling and
in training differ (`importance_sampling_correction`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext.utils.files import write_text

Logps = tuple[np.ndarray, ...]
"""Log-probabilities of the tokens of each completion, float32."""


@dataclass(frozen=True)
class Rollout:
    """A prompt and its completions.

    Attributes:
        row_index: index of the prompt in the dataset.
        prompt_ids: tokens of the prompt, at least one.
        completion_ids: tokens of each completion, at least one; the end token is included.
        old_logps: log-probabilities under the model before the first update with the group.
        rewards: total reward of each completion, float64 [G]; NaN: no reward.
        sampling_logps: log-probabilities in sampling; None: `old_logps`.
        reference_logps: log-probabilities under the reference model; None: not computed.
        scores: name of a reward function -> its rewards, float64 [G].
    """

    row_index: int
    prompt_ids: Sequence[int]
    completion_ids: tuple[Sequence[int], ...]
    old_logps: Logps
    rewards: np.ndarray
    sampling_logps: Logps | None = None
    reference_logps: Logps | None = None
    scores: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each completion, int64 [G]."""
        return np.array([len(ids) for ids in self.completion_ids], np.int64)

    def is_truncated(self, end_tokens: frozenset[int]) -> np.ndarray:
        """Return which completions do not end with an end token, bool [G]."""
        return np.array([ids[-1] not in end_tokens for ids in self.completion_ids], bool)


def scores_by_name(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Return the rewards of each function for the completions of all groups that have its rewards.

    Args:
        rollouts: groups, whose names of reward functions may differ.
    """
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.scores)
    return {name: np.concatenate([each.scores[name] for each in rollouts if name in each.scores]) for name in names}


def write_rollouts(file: Path, rollouts: Sequence[Rollout]) -> None:
    """Write groups to a file, atomically.

    Raises:
        StorageError: the file cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "".join(map(rollout_line, rollouts)))


def rollout_line(rollout: Rollout) -> str:
    """Return the line of a group, with its line break."""
    return json.dumps(_to_json(rollout), allow_nan=False) + "\n"


def read_rollouts(file: str | os.PathLike[str]) -> list[Rollout]:
    """Read the groups of a file. A group without `row` gets its index in the file.

    Raises:
        ValueError: the file cannot be read, is empty, or a line is not a valid group; the message names the line.
    """
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read ({error}); name a file of rollouts") from error
    rollouts: list[Rollout] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rollouts.append(_from_json(json.loads(line), len(rollouts)))
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"{file}:{number}: the line is not a group of completions: {error}") from error
    if not rollouts:
        raise ValueError(f"{file} is empty; name a file of rollouts")
    return rollouts


def _to_json(rollout: Rollout) -> dict[str, Any]:
    value: dict[str, Any] = {
        "prompt_ids": [int(token) for token in rollout.prompt_ids],
        "completion_ids": [[int(token) for token in ids] for ids in rollout.completion_ids],
        "old_logps": _shortest(rollout.old_logps),
        "rewards": _numbers(rollout.rewards),
        "row": rollout.row_index,
        "scores": {name: _numbers(values) for name, values in rollout.scores.items()},
    }
    if rollout.sampling_logps is not None:
        value["sampling_logps"] = _shortest(rollout.sampling_logps)
    return value


def _numbers(values: np.ndarray) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]


def _shortest(logps: Logps) -> list[list[float]]:
    """Return the shortest decimal number of each float32 value."""
    return [[float(str(value)) for value in each.astype(np.float32)] for each in logps]


def _from_json(value: Any, number: int) -> Rollout:
    if not isinstance(value, dict):
        raise ValueError("the line is not a JSON object")
    for name in ("prompt_ids", "completion_ids", "old_logps", "rewards"):
        if not isinstance(value.get(name), list) or not value[name]:
            raise ValueError(f"{name} is missing or is not a list; see docs/grpo.md")
    completions = tuple(_tokens(ids, "completion_ids") for ids in value["completion_ids"])
    sampling = value.get("sampling_logps")
    scores = value.get("scores", {})
    if not isinstance(scores, dict):
        raise ValueError("scores is not an object; write the rewards of each reward function under its name")
    return Rollout(
        row_index=int(value.get("row", number)),
        prompt_ids=_tokens(value["prompt_ids"], "prompt_ids"),
        completion_ids=completions,
        old_logps=_logps(value["old_logps"], completions, "old_logps"),
        rewards=_rewards(value["rewards"], completions, "rewards"),
        sampling_logps=None if sampling is None else _logps(sampling, completions, "sampling_logps"),
        scores={name: _rewards(values, completions, f"scores: {name}") for name, values in scores.items()},
    )


def _tokens(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(token) is int and token >= 0 for token in value):
        raise ValueError(f"{name} has {value!r:.60}, which is not a list of token ids")
    return value


def _rewards(value: Any, completions: Sequence[Sequence[int]], name: str) -> np.ndarray:
    """Return rewards as float64 [G], with NaN for null."""
    if not isinstance(value, list) or len(value) != len(completions):
        raise ValueError(f"{name} must have one number or null for each of the {len(completions)} completions")
    for reward in value:
        if reward is not None and (type(reward) not in (int, float) or not math.isfinite(reward)):
            raise ValueError(f"{name} has {reward!r:.60}, which is not a finite number or null")
    return np.array([np.nan if reward is None else reward for reward in value], np.float64)


def _logps(value: Any, completions: Sequence[Sequence[int]], name: str) -> Logps:
    logps = tuple(np.array(each, np.float32) for each in value)
    lengths = [len(ids) for ids in completions]
    if [each.shape for each in logps] != [(length,) for length in lengths]:
        raise ValueError(f"{name} must have one number per token of each completion")
    if not all(np.isfinite(each).all() for each in logps):
        raise ValueError(f"{name} has numbers that are not finite")
    return logps
