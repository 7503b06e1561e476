"""Code in completions: tests passed, and limits of the processes."""

from __future__ import annotations

import os
import sys
import time

import pytest

from paddlenlp_ext.config.sections.rewards import RewardsConfig
from paddlenlp_ext.rewards.functions.run_code import code_of, run_code
from paddlenlp_ext.rewards.limited_process import runs_to_end
from paddlenlp_ext.rewards.load_rewards import load_rewards
from paddlenlp_ext.rewards.score import score

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of processes need Linux")
MEMORY = 512 << 20


def test_run_code_returns_the_share_of_passed_tests() -> None:
    reward = run_code(RewardsConfig(reward_run_code=True))
    code = "def add(a, b):\n    return a + b"
    completions = [code, f"Here:\n```python\n{code}\n```\nDone.", "no code", code, code]
    tests = [["assert add(1, 2) == 3", "assert add(1, 1) == 3"], "assert add(1, 2) == 3", "assert True", None, []]
    assert reward(completions=completions, tests=tests) == [0.5, 1.0, 0.0, None, None]


def test_code_of_markdown_is_the_last_block() -> None:
    assert code_of("```\na\n```\ntext\n```py\nb\n```") == "b\n"
    assert code_of("a = 1") == "a = 1"


@pytest.mark.parametrize(
    "code",
    [
        "raise ValueError",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "x = bytearray(1 << 30)",
        "import os\nif os.fork():\n    pass\nopen('big', 'wb').write(bytes(1 << 22))",
        "open('big', 'wb').write(bytes(1 << 22))",
        "import sys\nsys.stdin.read()\ninput()",
        "syntax error",
    ],
)
def test_runs_to_end_of_failing_code_is_false(code: str) -> None:
    assert not runs_to_end(code, seconds=2, memory=MEMORY)


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(100)"])
def test_runs_to_end_of_hanging_code_ends_in_time(code: str) -> None:
    started = time.perf_counter()
    with pytest.raises(TimeoutError):
        runs_to_end(code, seconds=1, memory=MEMORY)
    assert time.perf_counter() - started < 20


def test_runs_to_end_of_a_dataclass_with_string_annotations_is_true() -> None:
    code = "from __future__ import annotations\nfrom dataclasses import dataclass\n\n@dataclass\nclass A:\n    x: int"
    assert runs_to_end(f"{code}\n\nassert A(1).x == 1", seconds=5, memory=MEMORY)


def test_run_code_of_a_loop_runs_no_further_test_and_ends_without_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddlenlp_ext.rewards.functions.run_code.threads_per_process", lambda: 1)
    keys = {"reward_run_code": True, "reward_code_seconds": 1, "reward_time_limit": 0.5, "reward_funcs": ["run_code"]}
    rewards = load_rewards(RewardsConfig(**keys))
    started = time.perf_counter()
    tests = [["assert True", "while True: pass", *["while True: pass"] * 20]]
    scores = score(rewards, [""], ["pass"], [[1]], {"tests": tests})
    assert scores.tolist() == [[1 / 22]]
    assert time.perf_counter() - started < 20


def test_runs_to_end_isolates_folder_and_environment() -> None:
    os.environ["SECRET_OF_TEST"] = "1"
    try:
        checks = ("'SECRET_OF_TEST' not in os.environ", "os.listdir('.') == []", "sys.argv == ['-c']")
        code = "\n".join(["import os, sys", *(f"assert {check}" for check in checks)])
        assert runs_to_end(code, seconds=5, memory=MEMORY)
    finally:
        del os.environ["SECRET_OF_TEST"]
    assert runs_to_end("print('x' * 1000)\nif __name__ == '__main__':\n    raise ValueError", seconds=5, memory=MEMORY)
