"""Two data-parallel processes, compared with one process that runs their micro-batches in sequence."""

from __future__ import annotations

import pytest

from tests.common.parallel import NUM_STEPS, Case, assert_same_run, launch, outcome, run_case, selected_cases

DROPOUT = {"rank": 4, "dropout": 0.3}
# With a falling loss the first evaluation is the best, so that both processes have to stop after the third.
STOPS_EARLY = {"evaluation_strategy": "steps", "eval_steps": 2, "greater_is_better": True, "early_stopping_patience": 2}
SHORT = [
    Case("sft"),
    Case("sft-uneven", {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 4}),
    Case("lora-dropout-noise", {"neftune": True}, switch="lora", peft=DROPOUT),
]
LONG = [
    Case(
        "sft-untied-accumulated-pose",
        {"gradient_accumulation_steps": 2, "use_pose_convert": True},
        {"tie_word_embeddings": False},
    ),
    Case("sft-stops-early", STOPS_EARLY),
    Case("adalora", switch="adalora", peft={"tinit": 2, "tfinal": 4}),
    Case("prefix-12-layers", {}, {"num_hidden_layers": 12}, "prefix_tuning", {"num_tokens": 3}),  # 10 is not before 2
]
CASES = [*SHORT, *(pytest.param(case, marks=pytest.mark.layouts) for case in LONG)]


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data_parallel")
    return folder, launch(2, selected_cases(request), folder)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_data_parallel_on_two_processes_matches_one_process(runs, case):
    folder, outcomes = runs
    single = case.on_one_process(data_ranks=2)
    run_case(single, folder)
    assert_same_run(outcomes[case.name], outcome(single, folder))
    assert len(outcomes[case.name].losses) == (6 if case.keys == STOPS_EARLY else NUM_STEPS)
