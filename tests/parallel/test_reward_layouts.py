"""Runs of reward models on two processes along each axis, compared with one process."""

from __future__ import annotations

import pytest

from tests.common.parallel import Case, assert_same_run, launch, outcome, run_case

pytestmark = pytest.mark.layouts

REWARD = {"learning_rate": 3e-4, "max_length": 48, "center_rewards_coefficient": 0.01}
LORA = {"switch": "lora", "peft": {"rank": 4}}
CASES = {
    1: [
        Case("reward-sequence", {**REWARD, "tensor_parallel_degree": 2, "sequence_parallel": True}),
        Case("reward-lora-tensor", {**REWARD, "tensor_parallel_degree": 2}, **LORA),
        Case("reward-stages", {**REWARD, "pipeline_parallel_degree": 2}, {"num_hidden_layers": 4}),
        Case("reward-lora-stages", {**REWARD, "pipeline_parallel_degree": 2}, {"num_hidden_layers": 4}, **LORA),
    ],
    2: [Case("reward-stage3", {**REWARD, "sharding": "stage3"})],
}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_processes")
    return folder, launch(2, [case for cases in CASES.values() for case in cases], folder)


@pytest.mark.parametrize(
    ("replicas", "case"),
    [pytest.param(replicas, case, id=case.name) for replicas, cases in CASES.items() for case in cases],
)
def test_reward_run_on_two_processes_matches_one_process(two, replicas, case):
    folder, outcomes = two
    single = case.on_one_process(replicas)
    run_case(single, folder)
    assert_same_run(outcomes[case.name], outcome(single, folder))
