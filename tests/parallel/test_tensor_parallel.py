"""Two tensor-parallel processes, compared with one: losses, norms, evaluation and saved weights of ten steps."""

from __future__ import annotations

import pytest

from tests.common.hybrid_models import GEMMA_4, GRANITE_4_H, LFM2, NEMOTRON_H, QWEN3_5
from tests.common.models import TINY_KIMI_DELTA, TINY_LATENT, TINY_LATENT_EXPERTS, TINY_MAMBA, TINY_TWO_MIXERS
from tests.common.parallel import Case, assert_same_run, launch, outcome, run_case, selected_cases

TENSOR = {"tensor_parallel_degree": 2}
UNTIED = {"tie_word_embeddings": False}
BIASED = {"attention_bias": True, "mlp_bias": True, **UNTIED}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8}
STABLE = {"adam_epsilon": 1e-4}  # as in test_mesh_layouts.py
REPLACED = {
    "rank": 4,
    "trainable_bias": "all",
    "lora_bias": True,
    "exclude_modules": ("k_proj",),  # a bias of k hardly changes the softmax: its gradient is mostly rounding
    "modules_to_save": ("embed_tokens", "lm_head", "norm", "gate_proj"),
}
TABLES = {"rank": 4, "target_modules": ("v_proj", "embed_tokens", "lm_head")}
TOKENS = {"embed_tokens": list(range(3, 60, 3))}
BOTH_TABLES = {"target_modules": ("embed_tokens", "lm_head")}

SHORT = [
    Case("sft", TENSOR),
    Case("sft-biased-recomputed", {**TENSOR, "recompute": True}, BIASED),
    Case("lora-dropout-biased", {**TENSOR, "recompute": True}, BIASED, "lora", {"rank": 4, "dropout": 0.3}),
    Case("sp-sft", {**TENSOR, "sequence_parallel": True}),
]
MORE_CASES = [
    Case("sft-untied-accumulated", {**TENSOR, "gradient_accumulation_steps": 2}, UNTIED),
    Case("adalora", TENSOR, switch="adalora", peft={"tinit": 2, "tfinal": 4}),
    Case("prefix", TENSOR, switch="prefix_tuning", peft={"num_tokens": 3, "dropout": 0.2}),
    Case("vera", TENSOR, switch="vera", peft={"rank": 8, "dropout": 0.2}),
    Case("dora", TENSOR, BIASED, "use_dora", {"rank": 4, "dropout": 0.2}),
    Case("lora", TENSOR, switch="lora", peft={"rank": 4}),
    Case("sft-muon", {**TENSOR, "optim": "muon", "weight_decay": 0.1}, BIASED),
    Case("sft-noise", {**TENSOR, "neftune": True}),
    Case("sft-qwen3-clipped", {**TENSOR, "max_grad_norm": 0.5}, QWEN3),
    Case("pissa", TENSOR, switch="pissa", peft={"rank": 4}),
    Case("lora-ga", TENSOR, switch="lora_ga", peft={"rank": 4, "ga_batches": 2}),
    Case("moslora", TENSOR, switch="lora_use_mixer", peft={"rank": 4}),
    Case("sora", TENSOR, switch="sora", peft={"rank": 4}),
    Case("lokr", TENSOR, switch="lokr", peft={"rank": 2, "factor": 4}),
    Case("loha", TENSOR, switch="loha", peft={"rank": 2}),
    Case("miss", TENSOR, switch="miss", peft={"rank": 5, "dropout": 0.2}),
    Case("miss-mini", TENSOR, switch="miss", peft={"rank": 5, "variant": "mini", "mini_rank": 4}),
    Case("miss-bat", TENSOR, switch="miss", peft={"rank": 4, "variant": "bat"}),
    Case("hira", TENSOR, switch="hira", peft={"rank": 4, "dropout": 0.2}),
    Case("shira", TENSOR, switch="shira", peft={"rank": 4}),
    Case("boft", TENSOR, BIASED, "boft", {"butterfly_factors": 2, "dropout": 0.3}),
    Case("lora-replaced", {**TENSOR, **STABLE}, BIASED, "lora", REPLACED),
    Case("lora-replaced-tied", TENSOR, {}, "lora", {"rank": 4, "modules_to_save": ("lm_head", "o_proj")}),
    Case("lora-tables", TENSOR, UNTIED, "lora", {**TABLES, "dropout": 0.2}),
    Case("lora-tables-tied", TENSOR, {}, "lora", {**TABLES, "dropout": 0.2}),
    Case("lora-tokens", TENSOR, UNTIED, "lora", {"rank": 4, "trainable_token_indices": {**TOKENS, "lm_head": [5, 60]}}),
    Case("ia3", TENSOR, BIASED, "ia3"),
    Case("hra", TENSOR, BIASED, "hra", {"rank": 4}),
    Case("hra-gram-schmidt", TENSOR, switch="hra", peft={"rank": 3, "gram_schmidt": True}),
    Case("ln", TENSOR, QWEN3, "ln_tuning", {"target_modules": ("q_norm", "input_layernorm", "model.norm")}),
    Case("oft", TENSOR, switch="oft", peft={"block_size": 4}),
    Case("bottleneck", TENSOR, switch="adapter", peft={"size": 8}),
    Case("prefix-projected", TENSOR, switch="prefix_tuning", peft={"num_tokens": 3, "projection": True}),
    Case("prompt", TENSOR, switch="prompt_tuning", peft={"num_tokens": 3}),
    Case("p-tuning", TENSOR, switch="p_tuning", peft={"num_tokens": 3, "encoder": "lstm", "encoder_dropout": 0.2}),
    Case("tokens-tied", TENSOR, switch="trainable_tokens", peft={"indices": (5, 40, 7)}),
    # Without lm_head, only tokens of the batch have gradients: enough of them that no step has none.
    Case("tokens-untied", TENSOR, UNTIED, "trainable_tokens", {"indices": tuple(range(3, 60, 3))}),
    Case("tokens-both", TENSOR, UNTIED, "trainable_tokens", {**BOTH_TABLES, "indices": tuple(range(3, 60, 3))}),
    Case("reft", TENSOR, switch="reft", peft={"rank": 4}),
]
SEQUENCE = [
    Case("sp-sft-biased-recomputed", {**TENSOR, "sequence_parallel": True, "recompute": True}, BIASED),
    Case("sp-sft-qwen3-noise", {**TENSOR, "sequence_parallel": True, "neftune": True}, QWEN3),
    Case("sp-lora-dropout", {**TENSOR, "sequence_parallel": True}, {}, "lora", {"rank": 4, "dropout": 0.3}),
    Case("sp-prefix", {**TENSOR, "sequence_parallel": True}, switch="prefix_tuning", peft={"num_tokens": 3}),
    Case("sp-bottleneck", {**TENSOR, "sequence_parallel": True}, switch="adapter", peft={"size": 8}),
    Case("sp-prompt", {**TENSOR, "sequence_parallel": True}, switch="prompt_tuning", peft={"num_tokens": 3}),
    Case("sp-lora-replaced", {**TENSOR, **STABLE, "sequence_parallel": True}, BIASED, "lora", REPLACED),
    Case("sp-tokens", {**TENSOR, "sequence_parallel": True}, switch="trainable_tokens", peft={"indices": (5, 40, 7)}),
    Case("sp-lora-tables", {**TENSOR, "sequence_parallel": True}, {}, "lora", {**TABLES, "dropout": 0.2}),
    Case("sp-ln", {**TENSOR, "sequence_parallel": True}, switch="ln_tuning"),
]
QWEN3_NEXT = {**QWEN3_5, "model_type": "qwen3_next", "mlp_only_layers": [0, 1]}  # without experts
OLMO_HYBRID = {
    **{key: value for key, value in QWEN3_5.items() if key.startswith("linear")},
    "model_type": "olmo_hybrid",
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA_GROUPS = {**TINY_MAMBA, "mamba_proj_bias": True}
SOFT_CAPS = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}
FAMILIES = [
    Case("sft-olmo2", TENSOR, {"model_type": "olmo2"}),
    Case("sp-lora-olmo2", {**TENSOR, "sequence_parallel": True}, {"model_type": "olmo2"}, "lora", {"rank": 4}),
    Case("sp-sft-cohere2", {**TENSOR, "sequence_parallel": True}, {"model_type": "cohere2"}),
    Case("sp-sft-gemma2", {**TENSOR, "sequence_parallel": True}, {"model_type": "gemma2", "head_dim": 8, **SOFT_CAPS}),
    Case("sp-sft-gemma3", {**TENSOR, "sequence_parallel": True}, {"model_type": "gemma3_text", "head_dim": 8}),
    Case("sp-sft-gemma4", {**TENSOR, "sequence_parallel": True}, GEMMA_4),
    Case("sp-lora-gemma4", {**TENSOR, "sequence_parallel": True}, GEMMA_4, "lora", {"rank": 4}),
    Case("sp-sft-fused", {**TENSOR, "sequence_parallel": True}, {"model_type": "phi3", "partial_rotary_factor": 0.5}),
    Case("lora-fused", TENSOR, {"model_type": "phi3"}, "lora", {"rank": 4}),
    Case("sp-sft-glm4", {**TENSOR, "sequence_parallel": True}, {"model_type": "glm4", "head_dim": 8}),
    Case("sft-apertus", TENSOR, {"model_type": "apertus", "rope_theta": 1e4}),
    Case("sp-sft-lfm2", {**TENSOR, "sequence_parallel": True}, LFM2),
    Case("sp-lora-lfm2", {**TENSOR, "sequence_parallel": True}, LFM2, "lora", {"rank": 4}),
    Case("sp-sft-qwen3_5", {**TENSOR, **STABLE, "sequence_parallel": True}, QWEN3_5),
    Case("lora-qwen3_5", {**TENSOR, **STABLE}, QWEN3_5, "lora", {"rank": 4}),
    Case("sp-sft-qwen3_next", {**TENSOR, **STABLE, "sequence_parallel": True}, QWEN3_NEXT),
    Case("lora-qwen3_next", {**TENSOR, **STABLE}, QWEN3_NEXT, "lora", {"rank": 4}),
    Case("sp-sft-olmo_hybrid", {**TENSOR, **STABLE, "sequence_parallel": True}, OLMO_HYBRID),
    Case("lora-olmo_hybrid", {**TENSOR, **STABLE}, OLMO_HYBRID, "lora", {"rank": 4}),
    Case("sp-sft-granite_4_h", {**TENSOR, "sequence_parallel": True}, GRANITE_4_H),
    Case("lora-granite_4_h", TENSOR, GRANITE_4_H, "lora", {"rank": 4}),
    Case("sft-mamba-groups-recomputed", {**TENSOR, "recompute": True}, MAMBA_GROUPS),
    Case("sp-lora-mamba-groups", {**TENSOR, "sequence_parallel": True}, MAMBA_GROUPS, "lora", {"rank": 4}),
    Case("sp-sft-kimi_linear", {**TENSOR, "sequence_parallel": True}, TINY_KIMI_DELTA),
    Case("lora-kimi_linear", TENSOR, TINY_KIMI_DELTA, "lora", {"rank": 4}),
    Case("sp-sft-falcon_h1", {**TENSOR, "sequence_parallel": True}, TINY_TWO_MIXERS),
    Case("lora-falcon_h1", TENSOR, {**TINY_TWO_MIXERS, "mamba_rms_norm": True}, "lora", {"rank": 4}),
    Case("sp-sft-nemotron_h", {**TENSOR, "sequence_parallel": True}, NEMOTRON_H),
    Case("lora-nemotron_h", TENSOR, NEMOTRON_H, "lora", {"rank": 4}),
    Case("sft-smollm3", TENSOR, {"model_type": "smollm3", "no_rope_layer_interval": 2}),
]
MIXTRAL = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.2,
}
QWEN_MOE = {
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "mlp_only_layers": [0],
}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8, "swiglu_limit": 0.5}
ADAPTED_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight")
EXPERTS = [
    Case("sft-mixtral-accumulated", {**TENSOR, "gradient_accumulation_steps": 2}, MIXTRAL),
    Case("sft-qwen2-moe", TENSOR, QWEN_MOE),
    Case("sft-gpt-oss", TENSOR, {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], **GPT_OSS}),
    Case("sp-sft-mixtral-recomputed", {**TENSOR, "sequence_parallel": True, "recompute": True}, MIXTRAL),
    Case("lora-experts", TENSOR, MIXTRAL, "lora", {"rank": 4, "target_parameters": ADAPTED_EXPERTS}),
    Case("sp-lora-qwen2-moe", {**TENSOR, "sequence_parallel": True}, QWEN_MOE, "lora", {"rank": 4}),
]
LATENT = {**TINY_LATENT, "q_lora_rank": 12}
LATENTS = [
    Case("sft-latent", TENSOR, LATENT),
    Case("sft-latent-experts", TENSOR, {**LATENT, **TINY_LATENT_EXPERTS}),
    Case(
        "sp-sft-latent-recomputed", {**TENSOR, "sequence_parallel": True, "recompute": True}, {**TINY_LATENT, **BIASED}
    ),
    Case("sp-lora-latent", {**TENSOR, "sequence_parallel": True}, LATENT, "lora", {"rank": 4, "dropout": 0.3}),
    Case("dora-latent", TENSOR, LATENT, "use_dora", {"rank": 4}),
    Case("lora-ga-latent", {**TENSOR, "learning_rate": 3e-4}, LATENT, "lora_ga", {"rank": 4, "ga_batches": 2}),
    Case("sp-prefix-latent", {**TENSOR, "sequence_parallel": True}, LATENT, "prefix_tuning", {"num_tokens": 3}),
    Case("prefix-projected-latent", TENSOR, LATENT, "prefix_tuning", {"num_tokens": 3, "projection": True}),
]
ALIBI = {"rope_scaling": {"rope_type": "alibi"}}
LINEAR_BIASES = [
    Case("sft-alibi", TENSOR, ALIBI),
    Case("sp-prefix-alibi", {**TENSOR, "sequence_parallel": True}, ALIBI, "prefix_tuning", {"num_tokens": 3}),
]
LAYOUTS = (*MORE_CASES, *SEQUENCE, *FAMILIES, *EXPERTS, *LATENTS, *LINEAR_BIASES)
LONG = [pytest.param(case, marks=pytest.mark.layouts) for case in LAYOUTS]
CASES = [*SHORT, *LONG]


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensor_parallel")
    return folder, launch(2, selected_cases(request), folder, timeout=600)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tensor_parallel_on_two_processes_matches_one_process(runs, case):
    folder, outcomes = runs
    single = case.on_one_process()
    run_case(single, folder)
    assert_same_run(outcomes[case.name], outcome(single, folder))
