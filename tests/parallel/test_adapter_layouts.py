"""Runs of two processes that start from a saved adapter, compared with one process."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.common.parallel import Case, assert_same_run, launch, outcome, run_case

pytestmark = pytest.mark.layouts

BUDGET = {"init_r": 4, "target_r": 1, "tinit": 1, "tfinal": 2}
FIRST = Case("first", {"max_steps": 6, "learning_rate": 1e-2}, switch="adalora", peft=BUDGET)
SAVED = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
LAYOUTS = {
    "tensor": {"tensor_parallel_degree": 2},
    "stages": {"pipeline_parallel_degree": 2},
    "stage1": {"sharding": "stage1"},
    "stage3": {"sharding": "stage3"},
}


def test_adapter_folder_with_layers_of_rank_zero_trains_in_every_layout(tmp_path):
    """Check that empty tensors are read, gathered, assigned and sent."""
    run_case(FIRST, tmp_path)
    pattern = json.loads((tmp_path / "first" / "adapter_config.json").read_text())["rank_pattern"]
    assert not all(map(any, pattern.values())), "some layer must have rank 0"
    peft = {**BUDGET, "tfinal": 1, "path": str(tmp_path / "first")}
    cases = [Case(name, {**SAVED, **keys}, switch="adalora", peft=peft) for name, keys in LAYOUTS.items()]
    outcomes = launch(2, cases, tmp_path, timeout=120)
    for case in cases:
        single = case.on_one_process(data_ranks=2 if "sharding" in case.keys else 1)
        run_case(single, tmp_path)
        got, want = outcomes[case.name], outcome(single, tmp_path)
        not_empty = {name: value for name, value in want.weights.items() if value.size}
        assert got.weights.keys() == want.weights.keys()
        assert_same_run(
            dataclasses.replace(got, weights={name: got.weights[name] for name in not_empty}),
            dataclasses.replace(want, weights=not_empty),
        )
