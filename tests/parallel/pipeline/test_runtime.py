"""Two pipeline stages of one or two chunks, compared with one process: losses, norms, evaluation, saved weights."""

from __future__ import annotations

import pytest

from tests.common.hybrid_models import GEMMA_4, GRANITE_4_H, LFM2, NEMOTRON_H, QWEN3_5, repeated
from tests.common.parallel import Case, assert_same_run, launch, outcome, run_case, selected_cases

DEEP = {"num_hidden_layers": 4}
UNTIED = {**DEEP, "tie_word_embeddings": False}
PIPELINE = {"pipeline_parallel_degree": 2, "gradient_accumulation_steps": 3}
VIRTUAL = {**PIPELINE, "virtual_pp_degree": 2}
SOFT_CAPS = {
    **DEEP,
    "model_type": "gemma2",
    "head_dim": 8,
    "attn_logit_softcapping": 1.0,
    "final_logit_softcapping": 2.0,
}
AUXILIARY = {
    **DEEP,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}
SOME_LAYERS = {  # the last chunk has no router
    "model_type": "qwen2_moe",
    "num_hidden_layers": 5,
    "decoder_sparse_step": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 12,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}
ROUTERS = {"rank": 4, "target_modules": (".*layers.3.*q_proj",), "target_parameters": ("layers.1.mlp.gate.weight",)}
BOTH_TABLES = ("embed_tokens", "lm_head")

SHORT = [
    Case("sft", PIPELINE, DEEP),
    Case("sft-recomputed-noise-clipped", {**VIRTUAL, "recompute": True, "neftune": True, "max_grad_norm": 0.5}, DEEP),
    Case("lora", VIRTUAL, DEEP, "lora", {"rank": 4, "dropout": 0.3}),
]
LONG = [
    Case("sft-virtual", VIRTUAL, UNTIED),
    Case("lora-few-layers", PIPELINE, DEEP, "lora", {"rank": 4, "target_modules": (".*layers.3.*q_proj",)}),
    Case("lora-ga", VIRTUAL, DEEP, "lora_ga", {"rank": 4, "ga_batches": 2}),
    Case("prefix", VIRTUAL, DEEP, "prefix_tuning", {"num_tokens": 3, "dropout": 0.2}),
    Case("vera", PIPELINE, DEEP, "vera", {"rank": 8, "dropout": 0.2}),
    Case("adalora", PIPELINE, DEEP, "adalora", {"tinit": 2, "tfinal": 4}),
    Case("sft-one-micro-batch", {"pipeline_parallel_degree": 2}, UNTIED),
    Case("lora-recomputed", {**PIPELINE, "recompute": True}, DEEP, "lora", {"rank": 4, "dropout": 0.3}),
    Case("dora", PIPELINE, DEEP, "use_dora", {"rank": 4, "dropout": 0.2}),
    Case("pissa", PIPELINE, DEEP, "pissa", {"rank": 4}),
    Case("moslora", PIPELINE, DEEP, "lora_use_mixer", {"rank": 4}),
    Case("mora", PIPELINE, DEEP, "use_mora", {"rank": 4}),
    Case("sora", PIPELINE, DEEP, "sora", {"rank": 4}),
    Case("lokr", PIPELINE, DEEP, "lokr", {"rank": 2, "factor": 4}),
    Case("loha", PIPELINE, DEEP, "loha", {"rank": 2}),
    Case("miss", PIPELINE, DEEP, "miss", {"rank": 5, "dropout": 0.2}),
    Case("hira", PIPELINE, DEEP, "hira", {"rank": 4, "dropout": 0.2}),
    Case("shira", PIPELINE, DEEP, "shira", {"rank": 4}),
    Case("boft", PIPELINE, DEEP, "boft", {"butterfly_factors": 2, "dropout": 0.3}),
    Case("lora-tables", PIPELINE, DEEP, "lora", {"rank": 4, "target_modules": ("v_proj", "embed_tokens")}),
    Case("lora-tokens", PIPELINE, UNTIED, "lora", {"rank": 4, "trainable_token_indices": {"lm_head": [5, 40]}}),
    Case("ia3", PIPELINE, DEEP, "ia3"),
    Case("hra", PIPELINE, DEEP, "hra", {"rank": 4}),
    Case("ln", PIPELINE, DEEP, "ln_tuning"),
    Case("oft", PIPELINE, DEEP, "oft", {"block_size": 4}),
    Case("bottleneck", PIPELINE, DEEP, "adapter", {"size": 8}),
    Case("prefix-projected", PIPELINE, DEEP, "prefix_tuning", {"num_tokens": 3, "projection": True}),
    Case("prompt", VIRTUAL, DEEP, "prompt_tuning", {"num_tokens": 3}),
    Case("p-tuning", PIPELINE, DEEP, "p_tuning", {"num_tokens": 3, "encoder": "lstm", "encoder_dropout": 0.2}),
    Case("tokens-tied", VIRTUAL, DEEP, "trainable_tokens", {"indices": (5, 40, 7)}),
    Case("tokens-untied", PIPELINE, UNTIED, "trainable_tokens", {"indices": (5, 7), "target_modules": BOTH_TABLES}),
    Case("reft", PIPELINE, DEEP, "reft", {"rank": 4}),
    Case("sft-softcaps", VIRTUAL, SOFT_CAPS),
    Case("sft-layer-sizes-recomputed", {**VIRTUAL, "recompute": True}, repeated(GEMMA_4)),
    # The default rate raises the gradient norm to 23, which amplifies rounding beyond the tolerance.
    Case("sft-qwen3_5-recomputed", {**VIRTUAL, "recompute": True, "learning_rate": 1e-4}, repeated(QWEN3_5)),
    Case("lora-lfm2", VIRTUAL, repeated(LFM2), "lora", {"rank": 4}),
    Case("sft-granite_4_h", VIRTUAL, repeated(GRANITE_4_H)),
    Case("lora-nemotron_h", PIPELINE, NEMOTRON_H, "lora", {"rank": 4}),
    Case("sft-fused", VIRTUAL, {**DEEP, "model_type": "phi3"}),
    Case("lora-fused", PIPELINE, {**DEEP, "model_type": "phi3"}, "lora", {"rank": 4, "target_modules": ("v_proj",)}),
    Case("sft-auxiliary", VIRTUAL, AUXILIARY),
    Case("sft-auxiliary-some-layers", {**VIRTUAL, "recompute": True}, SOME_LAYERS),
    Case("lora-auxiliary-routers", PIPELINE, AUXILIARY, "lora", ROUTERS),
]
CASES = [*SHORT, *(pytest.param(case, marks=pytest.mark.layouts) for case in LONG)]


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    return folder, launch(2, selected_cases(request), folder)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pipeline_of_two_stages_matches_one_process(runs, case):
    folder, outcomes = runs
    single = case.on_one_process()
    run_case(single, folder)
    assert_same_run(outcomes[case.name], outcome(single, folder))
