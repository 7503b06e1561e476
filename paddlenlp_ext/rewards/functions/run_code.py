"""Reward of working code: the share of a row's tests that the code in a completion passes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paddlenlp_ext.config.sections.rewards import RewardsConfig
from paddlenlp_ext.rewards.limited_process import runs_to_end
from paddlenlp_ext.rewards.registry import REWARD_FUNCTIONS, RewardFunction, column_of, text_of

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


@REWARD_FUNCTIONS.register("run_code")
def run_code(config: RewardsConfig) -> RewardFunction:
    """Return the reward function that runs code with the tests in `reward_code_column`, such as assert statements.

    Raises:
        ValueError: `reward_run_code` is false, or the system is not Linux.
    """
    if not config.reward_run_code:
        raise ValueError(
            "reward_funcs: run_code runs code that the model writes on this machine; use a machine or container where "
            "this is safe, and set reward_run_code to true"
        )
    if sys.platform != "linux":
        raise ValueError("reward_funcs: run_code limits processes on Linux only; run it on Linux or in WSL 2")
    limits = {"seconds": config.reward_code_seconds, "memory": config.reward_code_memory << 20}

    def share(text: str, tests: str | Sequence[str]) -> float:
        code, listed = code_of(text), [tests] if isinstance(tests, str) else list(tests)
        return sum(runs_to_end(f"{code}\n\n{test}", **limits) for test in listed) / len(listed)

    def reward(completions: Sequence[Any], **columns: Sequence[Any]) -> list[float | None]:
        tests = column_of(columns, config.reward_code_column, "reward_code_column")
        with ThreadPoolExecutor(os.cpu_count() or 1) as executor:
            pairs = zip(completions, tests, strict=True)
            pending = [executor.submit(share, text_of(each), own) if own else None for each, own in pairs]
            return [None if each is None else each.result() for each in pending]

    return reward


def code_of(text: str) -> str:
    """Return the last code block of a text in Markdown; the whole text if there is none."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else text
