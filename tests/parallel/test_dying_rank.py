"""A process that dies ends the run at once, with its own error; one that is slow or finds NaN does not end it."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path

import pytest

from tests.common.parallel import Case, assert_same_run, logs, outcome, run_case, start, write_model

pytestmark = pytest.mark.layouts  # 20 seconds for each case, most of which the launcher waits

WORKER = Path(__file__).with_name("dying_worker.py")
MOST_SECONDS = 10.0
STEP = 8  # the last checkpoint before it is of step 6
CASE = Case("run", {"sharding": "stage2", "save_strategy": "steps", "save_steps": 3})
DEATHS = {
    "second-killed": ({"dying_rank": 1, "how": "killed"}, "the trainer process with rank=[1] was aborted"),
    "first-killed": ({"dying_rank": 0, "how": "killed"}, "the trainer process with rank=[0] was aborted"),
    "second-raises": ({"dying_rank": 1, "how": "raises"}, "RuntimeError: this process dies in the test"),
}
_ABORTED = re.compile(r"^ERROR ([0-9-]+ [0-9:]+),\d+ .*ABORT!!!", re.MULTILINE)


def run(folder: Path, case: Case, death: dict):
    write_model(case, folder)
    (folder / "case.json").write_text(json.dumps(dataclasses.asdict(case)))
    (folder / "death.json").write_text(json.dumps(death))
    return start(2, [str(WORKER), str(folder)], folder, timeout=120)


@pytest.fixture(scope="module")
def died(tmp_path_factory):
    """Return a function that runs a case once, until a process dies in the middle of a step."""
    made = {}

    def get(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, run(folder, CASE, {"step": STEP, **DEATHS[name][0]})
        return made[name]

    return get


@pytest.mark.parametrize("name", DEATHS)
def test_run_with_a_dying_rank_ends_with_its_error(died, name):
    folder, result = died(name)
    assert result.returncode != 0
    assert DEATHS[name][1] in result.stderr, result.stderr[-3000:] + logs(folder)
    # The launcher logs ABORT when no process is left, and exits 8 seconds later.
    aborted = _ABORTED.search(result.stderr)
    assert aborted, result.stderr[-3000:]
    died_at = float((folder / "died_at").read_text())
    assert time.mktime(time.strptime(aborted[1], "%Y-%m-%d %H:%M:%S")) - died_at < MOST_SECONDS


def test_run_resumed_after_a_dying_rank_matches_the_uninterrupted_run(died):
    folder, _ = died("second-killed")
    assert {path.name for path in (folder / "run").glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-6"}
    resumed = dataclasses.replace(CASE, keys={**CASE.keys, "resume_from_checkpoint": True})
    result = run(folder, resumed, {"step": -1, "dying_rank": 1, "how": "raises"})
    assert result.returncode == 0, logs(folder)
    single = CASE.on_one_process(data_ranks=2)
    run_case(single, folder)
    assert_same_run(outcome(resumed, folder), outcome(single, folder))


DISTURBANCES = {
    "gradient is NaN on one rank, skipped": ("gradient", {"sharding": "stage2", "nan_policy": "skip"}),
    "norm is NaN on one rank, rolled back": (
        "norm",
        {"tensor_parallel_degree": 2, "nan_policy": "rollback", "save_strategy": "steps", "save_steps": 3},
    ),
    "slow": ("sleeps", {"sharding": "stage2"}),
}


@pytest.mark.parametrize("name", DISTURBANCES)
def test_run_with_a_disturbed_rank_ends_as_one_process_without_the_step(name, tmp_path):
    how, keys = DISTURBANCES[name]
    case = Case("run", keys)
    result = run(tmp_path, case, {"step": STEP, "dying_rank": 1, "how": how})
    assert result.returncode == 0, logs(tmp_path)
    bad_steps = tmp_path / "run" / "bad_steps.jsonl"
    single = case.on_one_process(data_ranks=1 if "tensor_parallel_degree" in keys else 2)
    if how == "sleeps":
        assert not bad_steps.exists()
        assert "still waiting for rank 1 after 30 s" in (tmp_path / "log" / "workerlog.0").read_text()
    else:
        (entry,) = map(json.loads, bad_steps.read_text().splitlines())
        assert (entry["step"], entry["action"]) == (STEP, keys["nan_policy"])
        skipped = {"nan_policy": "raise", "skip_data_intervals": [[STEP, STEP]]}
        single = dataclasses.replace(single, keys={**single.keys, **skipped})
    run_case(single, tmp_path)
    assert_same_run(outcome(case, tmp_path), outcome(single, tmp_path))
