"""Recompute on two processes, compared with one process that saves all activations."""

from __future__ import annotations

import dataclasses

import pytest

from tests.common.parallel import Case, assert_same_run, launch, outcome, run_case

pytestmark = pytest.mark.layouts

TENSOR = {"tensor_parallel_degree": 2, "recompute": True}
SOME = {"refined_recompute": "attention_row_ln:-1,mlp_row_ln:1,flash_attn:1"}
ALL = {"refined_recompute": ",".join(f"{part}_ln:-1" for part in ("attention_row", "mlp_row", "attention_column"))}
OFFLOADED = {"recompute": True, "offload_recompute_inputs": True}
LORA = {"switch": "lora", "peft": {"rank": 4, "dropout": 0.3}}

CASES = [
    Case("refined", {**TENSOR, **SOME}),
    Case("refined-lora", {**TENSOR, **ALL}, **LORA),
    Case("refined-sequence", {**TENSOR, **ALL, **OFFLOADED, "sequence_parallel": True}),
    Case("attention", {**TENSOR, "recompute_granularity": "full_attn"}, **LORA),
    Case("core", {**TENSOR, "recompute_granularity": "core_attn", "no_recompute_layers": [0]}),
    Case("stage3", {"sharding": "stage3", **OFFLOADED, **SOME}),
    Case("stages", {"pipeline_parallel_degree": 2, **OFFLOADED, **ALL, "gradient_accumulation_steps": 3}, **LORA),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recompute_layouts")
    return folder, launch(2, CASES, folder, timeout=600)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_recompute_on_two_processes_matches_one_process_without(runs, case):
    folder, outcomes = runs
    single = case.on_one_process(data_ranks=2 if "sharding" in case.keys else 1)
    keys = {key: value for key, value in single.keys.items() if "recompute" not in key}
    single = dataclasses.replace(single, keys=keys)
    run_case(single, folder)
    assert_same_run(outcomes[case.name], outcome(single, folder))
