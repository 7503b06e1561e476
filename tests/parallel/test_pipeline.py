"""Two and four processes of a pipeline against one process: losses, norms, evaluation and the saved weights."""

from __future__ import annotations

import pytest
from parallel_cases import Case, assert_same_run, launch, outcome, run_case

DEEP = {"num_hidden_layers": 4}
UNTIED = {**DEEP, "tie_word_embeddings": False}
PIPELINE = {"pipeline_parallel_degree": 2, "gradient_accumulation_steps": 3}
VIRTUAL = {**PIPELINE, "virtual_pp_degree": 2}

TWO = [
    Case("sft", PIPELINE, DEEP),
    Case("sft-virtual", VIRTUAL, UNTIED),
    Case("sft-recomputed-noise-clipped", {**VIRTUAL, "recompute": True, "neftune": True, "max_grad_norm": 0.5}, DEEP),
    Case("sft-one-micro-batch", {"pipeline_parallel_degree": 2}, UNTIED),
    Case("lora", VIRTUAL, DEEP, "lora", {"rank": 4, "dropout": 0.3}),
    Case("lora-recomputed", {**PIPELINE, "recompute": True}, DEEP, "lora", {"rank": 4, "dropout": 0.3}),
    Case("lora-few-layers", PIPELINE, DEEP, "lora", {"rank": 4, "target_modules": (".*layers.3.*q_proj",)}),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    return folder, launch(2, TWO, folder)


@pytest.mark.parametrize("case", TWO, ids=lambda case: case.name)
def test_two_stages_are_one_process(runs, case):
    folder, outcomes = runs
    alone = case.alone()
    run_case(alone, folder)
    assert_same_run(outcomes[case.name], outcome(alone, folder))
