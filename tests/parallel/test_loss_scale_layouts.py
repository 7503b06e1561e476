"""Loss scaling on two processes: all ranks skip the same steps, and the run equals that of one process."""

from __future__ import annotations

import dataclasses
import json

import pytest

from paddlenlp_ext.config.sections.precision import PrecisionConfig
from paddlenlp_ext.trainer import trainer
from tests.common.float16 import OverflowingGradients
from tests.common.parallel import Case, assert_same_run, logs, outcome, run_case, start, write_model
from tests.common.scripts import ROOT

pytestmark = pytest.mark.layouts

WORKER = ROOT / "tests" / "parallel" / "float16_worker.py"
KEYS = {"scale_loss": 2.0**26, "max_steps": 8}
REPLICAS = {**KEYS, "gradient_accumulation_steps": 2}  # those of two ranks, on one process
CASES = [
    Case("data", KEYS),
    Case("tensor", {**REPLICAS, "tensor_parallel_degree": 2}),
    Case("stages", {**REPLICAS, "pipeline_parallel_degree": 2}),
    Case("stage2", {**KEYS, "sharding": "stage2"}),
    Case("stage3", {**KEYS, "sharding": "stage3"}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loss_scale")
    for case in CASES:
        write_model(case, folder)
    (folder / "cases.json").write_text(json.dumps([dataclasses.asdict(case) for case in CASES]))
    result = start(2, [str(WORKER), str(folder)], folder, timeout=120)
    assert result.returncode == 0, logs(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrecisionConfig, "scales_loss", True)
        patch.setattr(trainer, "build_objective", lambda config, *others: OverflowingGradients(config))
        run_case(Case("one", REPLICAS), folder)
    return folder


def scaling(folder, name: str) -> tuple:
    state = json.loads((folder / name / "trainer_state.json").read_text())
    return state["loss_scale"], state["overflow_steps"], [entry["step"] for entry in state["log_history"]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_overflow_on_two_processes_matches_one_process(folder, case):
    one = Case("one", REPLICAS)
    assert scaling(folder, case.name) == scaling(folder, "one")
    assert 0 < len(scaling(folder, "one")[1]) < KEYS["max_steps"] - 1
    assert_same_run(outcome(case, folder), outcome(one, folder))
