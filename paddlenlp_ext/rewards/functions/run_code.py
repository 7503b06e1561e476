"""Reward of working code: the fraction of a row's tests that the code in a completion passes."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from paddlenlp_ext._runtime import threads_per_process
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
        raise ValueError("reward_funcs: run_code can limit processes only on Linux; use Linux or WSL 2")
    return _TestedCode(config)


class _TestedCode:
    """Reward function that runs code with tests.

    Args:
        config: keys of rewards.
    """

    limits_time = True
    """A call has no time limit, because each process has one: the model may write endless loops."""

    def __init__(self, config: RewardsConfig) -> None:
        self._column = config.reward_code_column
        self._limits = {"seconds": config.reward_code_seconds, "memory": config.reward_code_memory << 20}

    def __call__(self, completions: Sequence[Any], **columns: Sequence[Any]) -> list[float | None]:
        """Return the fraction of passed tests of each completion; None: its row has no tests."""
        tests = column_of(columns, self._column, "reward_code_column")
        with ThreadPoolExecutor(threads_per_process()) as executor:
            pairs = zip(completions, tests, strict=True)
            pending = [executor.submit(self._share, text_of(each), own) if own else None for each, own in pairs]
            return [None if each is None else each.result() for each in pending]

    def _share(self, text: str, tests: str | Sequence[str]) -> float:
        code, listed = code_of(text), [tests] if isinstance(tests, str) else list(tests)
        num_passed = 0
        with suppress(TimeoutError):  # after a test that hangs, the others are likely to hang too, and count as failed
            for test in listed:
                num_passed += runs_to_end(f"{code}\n\n{test}", **self._limits)
        return num_passed / len(listed)


def code_of(text: str) -> str:
    """Return the last code block of a text in Markdown; the whole text if there is none."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else text
