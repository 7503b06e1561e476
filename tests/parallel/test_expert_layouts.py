"""Processes that divide the experts of a model, compared with one process: losses, norms, evaluation, weights."""

from __future__ import annotations

import json

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from tests.common.models import TINY_LATENT, TINY_LATENT_EXPERTS
from tests.common.parallel import (
    Case,
    Outcome,
    assert_same_run,
    launch,
    outcome,
    run_case,
    selected_cases,
    write_model,
)

pytestmark = pytest.mark.layouts

MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
AUXILIARY = {**MIXTRAL, "output_router_logits": True, "router_aux_loss_coef": 0.1}
MANY = {**MIXTRAL, "num_local_experts": 12, "num_experts_per_tok": 1}
SHARED = {
    "model_type": "qwen2_moe",
    "num_experts": 4,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 12,
    "norm_topk_prob": True,
}
SKEWED = {
    "model_type": "ernie4_5_moe",
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 20,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
}
"""Every token chooses the last two experts (`skew`): the first half of the expert ranks receives no rows."""
BIASED = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "sliding_window": 8,
    "swiglu_limit": 0.6,  # the gradient jumps there: no activation of these runs is within rounding of it
}
LATENT = {**TINY_LATENT, **TINY_LATENT_EXPERTS, "q_lora_rank": 12}
BESIDE = {
    "model_type": "gemma4_text",
    "head_dim": 8,
    "global_head_dim": 12,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 20,
}
"""Experts beside the feed-forward block."""
LORA_BESIDE = {"rank": 4, "target_parameters": ("experts.gate_up_proj", "experts.down_proj", "router.proj.weight")}
LORA = ("lora", {"rank": 4, "dropout": 0.3})
ON_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight")
LORA_ON_EXPERTS = ("lora", {"rank": 4, "target_parameters": ON_EXPERTS})
EXPERTS = {"expert_parallel_degree": 2}
NF4 = {"weight_quantize_algo": "nf4", "weight_double_quant": True}
FOUR_EXPERTS = {"expert_parallel_degree": 4}
ACCUMULATED = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 4}
TENSOR = {**EXPERTS, "tensor_parallel_degree": 2}
STAGES = {**EXPERTS, "pipeline_parallel_degree": 2, "gradient_accumulation_steps": 3}

# number of replicas -> runs
TWO = {
    2: [
        Case("sft-uneven", {**EXPERTS, **ACCUMULATED}, AUXILIARY),
        Case("sft-skewed-recomputed", {**EXPERTS, "recompute": True}, SKEWED),
        Case("sft-idle-stage1", {**EXPERTS, "sharding": "stage1"}, MANY),
        Case("sft-shared-stage3", {**EXPERTS, "sharding": "stage3", "max_grad_norm": 0.5}, SHARED),
        Case("sft-biased-stage3", {**EXPERTS, "sharding": "stage3"}, BIASED),
        Case("sft-latent", EXPERTS, LATENT),
        Case("sft-beside", {**EXPERTS, **ACCUMULATED}, BESIDE),
        Case("lora-experts-beside", {**EXPERTS, "recompute": True}, BESIDE, "lora", LORA_BESIDE),
        Case("lora-shared", {**EXPERTS, "recompute": True}, SHARED, *LORA),
        Case("lora-stage3", {**EXPERTS, "sharding": "stage3"}, AUXILIARY, *LORA),
        Case("lora-experts", {**EXPERTS, **ACCUMULATED, "max_grad_norm": 0.5}, AUXILIARY, *LORA_ON_EXPERTS),
        Case("lora-experts-stage3", {**EXPERTS, "sharding": "stage3", "recompute": True}, SHARED, *LORA_ON_EXPERTS),
        Case("lora-ga", EXPERTS, MIXTRAL, "lora_ga", {"rank": 4, "ga_batches": 2}),
        Case("qlora", {**EXPERTS, "weight_quantize_algo": "nf4"}, SHARED, *LORA),
        Case("qlora-experts-stage3", {**EXPERTS, **NF4, "sharding": "stage3"}, SHARED, *LORA_ON_EXPERTS),
        Case("sft-muon-random", {**EXPERTS, "optim": "muon", "continue_training": False}, MIXTRAL),
        Case("dpo", {**EXPERTS, "loss_type": "sigmoid", "beta": 0.5}, MIXTRAL),
    ]
}
FOUR = {
    4: [
        Case("sft-four", {**FOUR_EXPERTS, **ACCUMULATED}, AUXILIARY),
        Case("sft-four-idle", FOUR_EXPERTS, MANY),
        Case("sft-data", {**EXPERTS, "max_grad_norm": 0.5}, SHARED),
        Case("lora-experts-data", {**EXPERTS, "max_grad_norm": 0.5}, SHARED, *LORA_ON_EXPERTS),
        Case("sft-data-stage2", {**EXPERTS, "sharding": "stage2", "sharding_parallel_degree": 2}, AUXILIARY),
        Case("sft-four-data-stage1", {**FOUR_EXPERTS, "sharding": "stage1", "sharding_parallel_degree": 2}, MIXTRAL),
    ],
    2: [
        Case("sft-tensor", TENSOR, {**AUXILIARY, "num_local_experts": 8}),
        Case("sft-tensor-shared-sequence", {**TENSOR, "sequence_parallel": True, "recompute": True}, SHARED),
        Case("lora-tensor-stage3", {**TENSOR, "sharding": "stage3"}, SKEWED, *LORA),
        Case("sft-tensor-biased", TENSOR, BIASED),
        Case("lora-experts-tensor", TENSOR, MIXTRAL, *LORA_ON_EXPERTS),
        Case("qlora-experts-tensor", {**TENSOR, "weight_quantize_algo": "weight_only_int8"}, MIXTRAL, *LORA_ON_EXPERTS),
        Case("lora-experts-stages", STAGES, AUXILIARY, *LORA_ON_EXPERTS),
        Case("sft-stages", STAGES, {**SHARED, "output_router_logits": True, "router_aux_loss_coef": 0.1}),
        Case("sft-stages-uneven", {**STAGES, **ACCUMULATED, "virtual_pp_degree": 2}, {**MANY, "num_hidden_layers": 4}),
        Case("lora-stages-stage1", {**STAGES, "sharding": "stage1", "recompute": True}, SKEWED, *LORA),
    ],
}


EIGHT = {
    4: [
        Case("sft-four-tensor", {**FOUR_EXPERTS, "tensor_parallel_degree": 2}, {**AUXILIARY, "num_local_experts": 8}),
        Case("sft-four-stages", {**STAGES, **FOUR_EXPERTS}, SHARED),
    ],
    2: [Case("sft-tensor-stages", {**STAGES, **TENSOR}, SHARED)],
}


def skew(case: Case, folder) -> None:
    """Write the model of `SKEWED`: corrections that exceed all scores choose the last two experts."""
    path = write_model(case, folder)
    model = AutoModelForCausalLM.from_pretrained(path)
    for name, parameter in model.named_parameters():
        if name.endswith("e_score_correction_bias"):
            parameter.set_value(paddle.to_tensor([[0.0, 0.0, 5.0, 5.0]]))
    model.save_pretrained(path)


def case_parameters(runs: dict[int, list[Case]]) -> list:
    """Return (replicas, case) parameters for pytest."""
    return [pytest.param(replicas, case, id=case.name) for replicas, cases in runs.items() for case in cases]


def runs_of(processes: int, runs: dict[int, list[Case]], request, folder) -> tuple:
    selected = {case.name for case in selected_cases(request)}
    cases = [case for of_replicas in runs.values() for case in of_replicas if case.name in selected]
    for case in cases:
        if case.model == SKEWED:
            skew(case, folder)
    return folder, launch(processes, cases, folder, timeout=600)


@pytest.fixture(scope="module")
def two(request, tmp_path_factory):
    return runs_of(2, TWO, request, tmp_path_factory.mktemp("two_expert_ranks"))


@pytest.fixture(scope="module")
def eight(request, tmp_path_factory):
    return runs_of(8, EIGHT, request, tmp_path_factory.mktemp("eight_processes"))


@pytest.fixture(scope="module")
def four(request, tmp_path_factory):
    return runs_of(4, FOUR, request, tmp_path_factory.mktemp("four_processes"))


def assert_matches_one_process(runs: tuple, replicas: int, case: Case) -> None:
    folder, outcomes = runs
    single = run_alone(case, replicas, folder)
    got, want = outcomes[case.name], outcome(single, folder)
    assert_same_run(got, want)
    np.testing.assert_allclose(imbalances(got), imbalances(want), rtol=1e-12)


def run_alone(case: Case, replicas: int, folder) -> Case:
    """Run a case on one process, unless another test has; return that case."""
    single = case.on_one_process(replicas)
    if not (folder / single.name).is_dir():
        run_case(single, folder)
    return single


def imbalances(run: Outcome) -> list[float]:
    """Return the imbalance of the experts in every step."""
    history = json.loads((run.folder / "trainer_state.json").read_text())["log_history"]
    return [entry["expert_imbalance"] for entry in history if "loss" in entry]


@pytest.mark.parametrize("replicas, case", case_parameters(TWO))
def test_expert_parallel_on_two_processes_matches_one_process(two, replicas, case):
    assert_matches_one_process(two, replicas, case)


@pytest.mark.parametrize("replicas, case", case_parameters(FOUR))
def test_expert_parallel_on_four_processes_matches_one_process(four, replicas, case):
    assert_matches_one_process(four, replicas, case)


@pytest.mark.slow
@pytest.mark.parametrize("replicas, case", case_parameters(EIGHT))
def test_expert_parallel_on_eight_processes_matches_one_process(eight, replicas, case):
    assert_matches_one_process(eight, replicas, case)


@pytest.mark.parametrize("case", [case for case in TWO[2] if case.name == "sft-uneven"])
def test_expert_parallel_on_two_processes_holds_half_of_the_experts(two, case):
    folder, outcomes = two
    single = run_alone(case, 2, folder)
    (full,), (first, second) = (
        [json.loads(file.read_text()) for file in sorted(of_run.glob("held-*.json"))]
        for of_run in (folder / single.name, outcomes[case.name].folder)
    )
    held_elsewhere = 4 * sum(
        value.size / 2 for name, value in outcomes[case.name].weights.items() if ".experts." in name
    )
    assert first == second
    assert full["values"] - first["values"] == held_elsewhere
    assert full["state"] - first["state"] == 2 * held_elsewhere  # two moments
