"""Four and eight processes along several axes, compared with one process: losses, norms, evaluation, weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.common.hybrid_models import GEMMA_4, GRANITE_4_H, LFM2, QWEN3_5, repeated
from tests.common.models import TINY_LATENT
from tests.common.parallel import Case, assert_same_run, launch, outcome, run_case, selected_cases

pytestmark = pytest.mark.layouts

DEEP = {"num_hidden_layers": 4}
BIASED = {**DEEP, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
GRANITE = {
    "model_type": "granite",
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.25,
}
EXPERTS = {
    **DEEP,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}
LORA = ("lora", {"rank": 4, "dropout": 0.3})
REPLACED = {
    "rank": 4,
    "trainable_bias": "adapted",
    "lora_bias": True,
    "exclude_modules": ("k_proj",),  # a bias of k hardly changes the softmax: its gradient is mostly rounding
    "modules_to_save": ("embed_tokens", "lm_head", "norm", "gate_proj"),
}
TENSOR = {"tensor_parallel_degree": 2}
STAGES = {"pipeline_parallel_degree": 2, "gradient_accumulation_steps": 3}
BOTH = {**STAGES, **TENSOR}
FOUR_STAGES = {"pipeline_parallel_degree": 4, "gradient_accumulation_steps": 6}
SHARDED = {**STAGES, "sharding": "stage1", "sharding_parallel_degree": 2}
DIVIDED = {**BOTH, "sequence_parallel": True}
OUTER = {"hybrid_parallel_topo_order": "sharding_first"}


def shared(stage: int) -> dict[str, object]:
    """Return keys of two tensor-parallel ranks times two sharding ranks."""
    return {**TENSOR, "sharding": f"stage{stage}", "sharding_parallel_degree": 2}


# number of replicas -> runs
FOUR = {
    1: [
        Case("sft-four-stages", FOUR_STAGES, DEEP),
        Case("lora-four-stages", FOUR_STAGES, BIASED, *LORA),
        Case("sft-tensor-stages", BOTH, DEEP),
        Case("sft-tensor-virtual", {**BOTH, **OUTER, "virtual_pp_degree": 2}, BIASED),
        Case("lora-tensor-stages", BOTH, BIASED, *LORA),
        Case("lora-replaced-tensor-stages", BOTH, BIASED, "lora", REPLACED),
        Case("lora-replaced-tied-tensor-stages", BOTH, DEEP, "lora", {"rank": 4, "modules_to_save": ("lm_head",)}),
        Case("adalora-tensor-stages", BOTH, DEEP, "adalora", {"tinit": 2, "tfinal": 4}),
        Case("prefix-tensor-stages", BOTH, DEEP, "prefix_tuning", {"num_tokens": 3, "projection": True}),
        Case("sft-granite-tensor-stages", BOTH, {**DEEP, **GRANITE}),
        Case("sft-latent-sequence-stages", DIVIDED, {**TINY_LATENT, **DEEP, "first_k_dense_replace": 4}),
        Case("sft-sequence-stages", DIVIDED, DEEP),
        # Larger steps amplify the rounding of step 1, 5e-8 of the gradient norm, to 4e-4.
        Case("sft-qwen3_5-sequence-stages", {**DIVIDED, "recompute": True, "learning_rate": 1e-4}, repeated(QWEN3_5)),
        Case("lora-lfm2-sequence-stages", DIVIDED, repeated(LFM2), *LORA),
        Case("sft-gemma4-sequence-stages", DIVIDED, repeated(GEMMA_4)),
        Case("lora-granite_4_h-sequence-stages", DIVIDED, repeated(GRANITE_4_H), *LORA),
        Case("sft-granite_4_h-four-ranks", {"tensor_parallel_degree": 4}, {**GRANITE_4_H, "num_key_value_heads": 4}),
        Case("sft-experts-sequence-stages", DIVIDED, EXPERTS),
        Case("sft-sequence-virtual", {**DIVIDED, "virtual_pp_degree": 2, "recompute": True}, BIASED),
        Case("lora-sequence-stages", {**DIVIDED, "recompute": True}, BIASED, *LORA),
        Case("lora-sequence-virtual", {**DIVIDED, **OUTER, "virtual_pp_degree": 2}, DEEP, *LORA),
        Case("prompt-sequence-stages", DIVIDED, DEEP, "prompt_tuning", {"num_tokens": 3}),
        Case("prefix-sequence-stages", DIVIDED, DEEP, "prefix_tuning", {"num_tokens": 3}),
        Case("bottleneck-sequence-stages", DIVIDED, DEEP, "adapter", {"size": 8}),
        Case("pissa-tensor-stages", BOTH, DEEP, "pissa", {"rank": 4}),
        Case("plain-moslora-tensor-stages", BOTH, DEEP, "lora_use_mixer", {"rank": 4, "mixer_to_lora": True}),
    ],
    2: [
        Case("sft-stages-data", STAGES, DEEP),
        Case("lora-stages-data", {**STAGES, "virtual_pp_degree": 2}, DEEP, *LORA),
        Case("sft-stages-sharded", {**SHARDED, **OUTER}, DEEP),
        Case("lora-stages-sharded", SHARDED, DEEP, *LORA),
        Case("sft-tensor-data", TENSOR),
        Case("lora-tensor-data", {**TENSOR, "sequence_parallel": True}, BIASED, *LORA),
        *[Case(f"sft-tensor-stage{stage}", shared(stage), BIASED) for stage in (1, 2, 3)],
        *[Case(f"lora-tensor-stage{stage}", shared(stage), {}, *LORA) for stage in (1, 3)],
        Case("lora-replaced-tensor-stage3", shared(3), BIASED, "lora", REPLACED),
        Case("sft-granite_4_h-tensor-stage3", shared(3), GRANITE_4_H),
        Case("lora-qwen3_5-tensor-stage2", shared(2), QWEN3_5, *LORA),
        Case("sft-lfm2-stages-sharded", SHARDED, repeated(LFM2)),
        Case("sft-gemma4-tensor-stage1", shared(1), GEMMA_4),
    ],
    4: [
        Case("sft-data"),
        Case("lora-data", {}, {}, *LORA),
        *[Case(f"sft-stage{stage}", {"sharding": f"stage{stage}"}) for stage in (1, 2, 3)],
        Case("sft-data-stage2", {"sharding": "stage2", "sharding_parallel_degree": 2}),
    ],
}
ALL = {**SHARDED, **TENSOR}
EIGHT = {
    2: [
        Case("sft-all", ALL, DEEP),
        Case("sft-all-virtual", {**ALL, **OUTER, "virtual_pp_degree": 2}, BIASED),
        Case("lora-all", ALL, DEEP, *LORA),
        Case("sft-all-sequence", {**ALL, "sequence_parallel": True}, DEEP),
    ]
}


def case_parameters(runs: dict[int, list[Case]]) -> list:
    """Return (replicas, case) parameters for pytest."""
    return [pytest.param(replicas, case, id=case.name) for replicas, cases in runs.items() for case in cases]


def with_large_epsilon(case: Case) -> Case:
    """Return the case with a larger epsilon, without which a difference of 1e-7 at the start grows to 5e-5."""
    return replace(case, keys={"adam_epsilon": 1e-4, **case.keys})


def runs_of(processes: int, request: pytest.FixtureRequest, folder) -> tuple:
    cases = [with_large_epsilon(case) for case in selected_cases(request)]
    return folder, launch(processes, cases, folder, timeout=600)


@pytest.fixture(scope="module")
def four(request, tmp_path_factory):
    return runs_of(4, request, tmp_path_factory.mktemp("four_processes"))


@pytest.fixture(scope="module")
def eight(request, tmp_path_factory):
    return runs_of(8, request, tmp_path_factory.mktemp("eight_processes"))


def assert_matches_one_process(runs: tuple, replicas: int, case: Case) -> None:
    folder, outcomes = runs
    single = with_large_epsilon(case).on_one_process(replicas)
    run_case(single, folder)
    assert_same_run(outcomes[case.name], outcome(single, folder))


@pytest.mark.parametrize("replicas, case", case_parameters(FOUR))
def test_mesh_of_four_processes_matches_one_process(four, replicas, case):
    assert_matches_one_process(four, replicas, case)


@pytest.mark.slow
@pytest.mark.parametrize("replicas, case", case_parameters(EIGHT))
def test_mesh_of_eight_processes_matches_one_process(eight, replicas, case):
    assert_matches_one_process(eight, replicas, case)
