"""Two tensor-parallel processes against one: losses, norms, evaluation and the saved weights of 20 steps."""

from __future__ import annotations

import pytest
from parallel_cases import Case, assert_same_run, launch, outcome, run_case

TENSOR = {"tensor_parallel_degree": 2}
UNTIED = {"tie_word_embeddings": False}
BIASED = {"attention_bias": True, "mlp_bias": True, **UNTIED}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8}

MODELS = [
    Case("sft", TENSOR),
    Case("sft-untied-accumulated", {**TENSOR, "gradient_accumulation_steps": 2}, UNTIED),
    Case("sft-biased-recomputed", {**TENSOR, "recompute": True}, BIASED),
    Case("sft-qwen3-clipped", {**TENSOR, "max_grad_norm": 0.5}, QWEN3),
    Case("sft-noise", {**TENSOR, "neftune": True}),
]
ADAPTERS = [
    Case("lora", TENSOR, switch="lora", peft={"rank": 4}),
    Case("lora-dropout-biased", {**TENSOR, "recompute": True}, BIASED, "lora", {"rank": 4, "dropout": 0.3}),
]
CASES = [*MODELS, *ADAPTERS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensor_parallel")
    return folder, launch(2, CASES, folder)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_processes_are_one(runs, case):
    folder, outcomes = runs
    alone = case.alone()
    run_case(alone, folder)
    assert_same_run(outcomes[case.name], outcome(alone, folder))
