"""Preference runs on two processes along each axis, compared with one process."""

from __future__ import annotations

import pytest

from tests.common.parallel import Case, assert_same_run, launch, outcome, run_case

pytestmark = pytest.mark.layouts

KEYS = {"learning_rate": 3e-4, "max_length": 48}
DPO, KTO = {**KEYS, "loss_type": "sigmoid"}, {**KEYS, "loss_type": "kto", "sft_loss_ratio": 0.1}
CASES = {
    1: [
        Case("dpo-tensor", {**DPO, "tensor_parallel_degree": 2}),
        Case(
            "dpo-lora-tables", {**DPO, "tensor_parallel_degree": 2}, {}, "lora", {"target_modules": ("embed_tokens",)}
        ),
        Case("dpo-lora-stages", {**DPO, "pipeline_parallel_degree": 2}, {"num_hidden_layers": 4}, "lora", {"rank": 4}),
        Case("kto-lora-stages", {**KTO, "pipeline_parallel_degree": 2}, {}, "lora", {"rank": 4}),
    ],
    2: [
        Case("dpo-stage3", {**DPO, "sharding": "stage3"}),
        Case("kto-stage3", {**KTO, "sharding": "stage3"}),
        Case("dpo-lora-follows", {**DPO, "ref_model_update_steps": 7}, {}, "lora", {"rank": 4}),
    ],
}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_processes")
    return folder, launch(2, [case for cases in CASES.values() for case in cases], folder)


@pytest.mark.parametrize(
    ("replicas", "case"),
    [pytest.param(replicas, case, id=case.name) for replicas, cases in CASES.items() for case in cases],
)
def test_preference_run_on_two_processes_matches_one_process(two, replicas, case):
    folder, outcomes = two
    single = case.on_one_process(replicas)
    run_case(single, folder)
    assert_same_run(outcomes[case.name], outcome(single, folder))
