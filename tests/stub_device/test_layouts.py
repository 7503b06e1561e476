"""Layouts of several processes on the plug-in's devices, compared with one process on the CPU."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.common.parallel import Case, assert_same_run, launch, outcome, run_case, selected_cases
from tests.stub_device.plugin import run_with_stub, variables_of

TENSOR = {"tensor_parallel_degree": 2}
SEQUENCE = {**TENSOR, "sequence_parallel": True}
STAGES = {"pipeline_parallel_degree": 2, "gradient_accumulation_steps": 2}
NF4 = {"weight_quantize_algo": "nf4", "weight_double_quant": True}
DEEP = {"num_hidden_layers": 4}
WIDE = {"intermediate_size": 64, "attention_bias": True}
EXPERTS = {
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}
LORA = ("lora", {"rank": 4, "dropout": 0.3})
PREFERENCES = {"learning_rate": 3e-4, "max_length": 48}
DPO, KTO = {**PREFERENCES, "loss_type": "sigmoid"}, {**PREFERENCES, "loss_type": "kto"}

ANSWERS = {
    "eval_with_do_generation": True,
    "save_generation_output": True,
    "max_new_tokens": 6,
    "top_k": 8,
    "top_p": 0.9,
    "max_steps": 2,
    "learning_rate": 3e-2,
}


def sharded(stage: int) -> dict[str, object]:
    """Return keys of a ZeRO stage over two processes."""
    return {"sharding": f"stage{stage}", "sharding_parallel_degree": 2}


SHORT = {
    1: [Case("lora-sequence", SEQUENCE, WIDE, *LORA), Case("sft-stages", STAGES, DEEP)],
    2: [Case("sft-stage3", {**sharded(3), "recompute": True})],
}
LONG = {
    1: [
        Case("sft-tensor", TENSOR),
        Case("sft-sequence", {**SEQUENCE, "recompute": True}),
        Case("sft-experts-sequence", SEQUENCE, EXPERTS),
        Case("adalora-tensor", TENSOR, {}, "adalora", {"tinit": 2, "tfinal": 4}),
        Case("lora-virtual-stages", {**STAGES, "virtual_pp_degree": 2}, DEEP, *LORA),
        Case("lora-refined-stages", {**STAGES, "recompute": True, "refined_recompute": "mlp_row_ln:1"}, DEEP, *LORA),
        Case("dpo-tensor", {**DPO, **TENSOR}),
        Case("kto-lora-stages", {**KTO, **STAGES}, {}, *LORA),
        Case("nf4-lora-tensor", {**TENSOR, **NF4}, WIDE, *LORA),
        Case("nf4-lora-stages", {**STAGES, **NF4}, WIDE, *LORA),
    ],
    2: [
        Case("sft-data"),
        Case("lora-data", {}, {}, *LORA),
        Case("sft-stage1", sharded(1)),
        Case("sft-stage2", {**sharded(2), "gradient_accumulation_steps": 2}),
        Case("lora-stage3", sharded(3), {}, *LORA),
        Case("dpo-stage3", {**DPO, **sharded(3)}),
        Case("nf4-lora-stage3", {**sharded(3), **NF4}, WIDE, *LORA),
        Case("sft-expert-parallel", {"expert_parallel_degree": 2}, EXPERTS),
    ],
}
FOUR = {
    1: [
        Case("sft-sequence-stages", {**SEQUENCE, **STAGES}, DEEP),
        Case("lora-tensor-stages", {**TENSOR, **STAGES}, DEEP, *LORA),
    ],
    2: [Case("sft-tensor-stage3", {**TENSOR, **sharded(3)}), Case("sft-stages-stage1", {**STAGES, **sharded(1)}, DEEP)],
}


def parameters(runs: dict[int, list[Case]], *marks: pytest.MarkDecorator) -> list:
    """Return (replicas, case) parameters for pytest."""
    return [pytest.param(count, case, id=case.name, marks=marks) for count, cases in runs.items() for case in cases]


def on_stub(case: Case) -> Case:
    """Return the case on the plug-in's devices."""
    return dataclasses.replace(case, keys={**case.keys, "device": "stub"})


@pytest.fixture(scope="module")
def two(request, stub_folder, tmp_path_factory):
    return runs_of(2, request, stub_folder, tmp_path_factory.mktemp("two_processes"))


@pytest.fixture(scope="module")
def four(request, stub_folder, tmp_path_factory):
    return runs_of(4, request, stub_folder, tmp_path_factory.mktemp("four_processes"))


def runs_of(processes: int, request: pytest.FixtureRequest, stub_folder, folder) -> tuple:
    cases = [on_stub(case) for case in selected_cases(request)]
    return folder, launch(processes, cases, folder, 600, variables_of(stub_folder))


def assert_matches_one_process_on_the_cpu(runs: tuple, replicas: int, case: Case) -> None:
    folder, outcomes = runs
    single = case.on_one_process(replicas)
    run_case(single, folder)
    assert_same_run(outcomes[case.name], outcome(single, folder))


@pytest.mark.slow
@pytest.mark.parametrize("replicas, case", [*parameters(SHORT), *parameters(LONG, pytest.mark.layouts)])
def test_two_processes_match_one_process_on_the_cpu(two, replicas, case):
    assert_matches_one_process_on_the_cpu(two, replicas, case)


@pytest.mark.layouts
@pytest.mark.parametrize("replicas, case", parameters(FOUR))
def test_four_processes_match_one_process_on_the_cpu(four, replicas, case):
    assert_matches_one_process_on_the_cpu(four, replicas, case)


@pytest.mark.layouts
def test_checkpoint_resumes_in_another_layout_and_on_the_cpu(stub_folder, tmp_path):
    plugin, keys = variables_of(stub_folder), {"gradient_accumulation_steps": 2}
    saving = Case("saving", {**keys, **TENSOR, "save_strategy": "steps", "save_steps": 5}, WIDE, *LORA)
    launch(2, [on_stub(saving)], tmp_path, 600, plugin)
    checkpoint = {"resume_from_checkpoint": str(tmp_path / saving.name / "checkpoint-5")}
    resumed = Case("resumed", {**STAGES, **checkpoint}, WIDE, *LORA)
    on_cpu = Case("on-cpu", {**keys, **checkpoint}, WIDE, *LORA)
    outcomes = launch(2, [on_stub(resumed)], tmp_path, 600, plugin)
    single = saving.on_one_process()
    for case in (on_cpu, single):
        run_case(case, tmp_path)
    assert_same_run(outcomes[resumed.name], outcome(single, tmp_path))
    assert_same_run(outcome(on_cpu, tmp_path), outcome(single, tmp_path))


@pytest.mark.layouts
def test_doctor_trains_in_every_layout_as_on_the_cpu(stub_folder):
    words = ("-m", "paddlenlp_ext.doctor", "--device", "stub", "--areas", "layouts", "--seconds", "0")
    done = run_with_stub(stub_folder, *words)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert re.search(r"\| layouts \| stub float32 \| (\d+) of \1 \|", done.stdout)


@pytest.mark.layouts
def test_generated_answers_equal_the_answers_of_one_process_on_the_cpu(stub_folder, tmp_path):
    cases = [Case("sequence", {**ANSWERS, **SEQUENCE}), Case("stages", {**ANSWERS, **STAGES}, DEEP, *LORA)]
    launch(2, [on_stub(case) for case in cases], tmp_path, 600, variables_of(stub_folder))
    for case in cases:
        single = case.on_one_process()
        run_case(single, tmp_path)
        answers, expected = (tmp_path / name / "generated_output.json" for name in (case.name, single.name))
        assert answers.read_text() == expected.read_text(), case.name
