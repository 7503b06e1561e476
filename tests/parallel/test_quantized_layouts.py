"""Adapters over quantized and bfloat16 bases, and optimizers with small state: two processes compared with one."""

from __future__ import annotations

import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM, build_skeleton
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.ops.cpp import bf16
from paddlenlp_ext.parallel.tensor_parallel import check_tensor_plan
from paddlenlp_ext.quantization.config import QuantizationConfig
from tests.common.hybrid_models import GEMMA_4, GRANITE_4_H, LFM2, QWEN3_5
from tests.common.models import TINY_LATENT, TINY_LLAMA
from tests.common.parallel import Case, assert_same_run, differences, launch, outcome, run_case

pytestmark = pytest.mark.layouts

TENSOR = {"tensor_parallel_degree": 2}
STAGES = {"pipeline_parallel_degree": 2, "gradient_accumulation_steps": 2}
SHARDED = {"sharding": "stage3", "sharding_parallel_degree": 2}
NF4 = {"weight_quantize_algo": "nf4"}
DOUBLE = {**NF4, "weight_double_quant": True}
MIXED = {"weight_quantize_algo": {"q_proj": "weight_only_int8", "o_proj": "fp4", ".*_proj": "weight_only_int4"}}
FIRST = {"weight_quantize_algo": {".*layers.0..*": "nf4"}}  # nothing is quantized on the second stage
WIDE = {"intermediate_size": 64, "attention_bias": True}
RANK = {"rank": 4}
# Sizes of which two shards consist of complete blocks.
LATENT = {
    **TINY_LATENT,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "intermediate_size": 64,
}
HYBRIDS = {
    "qwen3_5": {**QWEN3_5, "linear_value_head_dim": 16, "intermediate_size": 64},
    "lfm2": {**LFM2, "intermediate_size": 64},
    "gemma4": {**GEMMA_4, "global_head_dim": 16, "intermediate_size": 64},
    "granite_4_h": {**GRANITE_4_H, "shared_intermediate_size": 64},
}

QUANTIZED = [
    Case("tensor-lora", {**TENSOR, **DOUBLE}, WIDE, "lora", RANK),
    Case("tensor-lora-mixed", {**TENSOR, **MIXED}, WIDE, "lora", {**RANK, "dropout": 0.2}),
    Case("tensor-q-only", {**TENSOR, **NF4}, WIDE, "lora", {**RANK, "target_modules": ["q_proj"]}),
    Case("tensor-dora", {**TENSOR, **NF4}, WIDE, "use_dora", RANK),
    Case("tensor-pissa", {**TENSOR, **NF4}, WIDE, "pissa", RANK),
    Case("tensor-qera", {**TENSOR, **NF4}, WIDE, "qera", {**RANK, "batches": 2}),
    Case("sequence-qera", {**TENSOR, **NF4, "sequence_parallel": True}, WIDE, "qera", {**RANK, "batches": 2}),
    Case("tensor-qera-latent", {**TENSOR, **NF4}, LATENT, "qera", {**RANK, "batches": 2}),
    Case("tensor-sequence", {**TENSOR, **NF4, "sequence_parallel": True}, WIDE, "lora", RANK),
    *[
        Case(f"sequence-{name}", {**TENSOR, **NF4, "sequence_parallel": True}, model, "lora", RANK)
        for name, model in HYBRIDS.items()
    ],
    Case("stages-lora", {**STAGES, **DOUBLE}, {}, "lora", RANK),
    Case("stages-loftq", {**STAGES, **NF4}, {}, "loftq", RANK),
    Case("stages-qera", {**STAGES, **NF4}, {}, "qera", {**RANK, "batches": 2}),
    Case("stages-qera-of-one", {**STAGES, **FIRST}, {}, "qera", {**RANK, "batches": 2}),
    Case("stages-random", {**STAGES, **MIXED, "continue_training": False}, {}, "lora", RANK),
]
REPLICATED = [
    Case("data-lora", NF4, {}, "lora", RANK),
    Case("sharded-lora", {**SHARDED, **DOUBLE}, {}, "lora", RANK),
    Case("sharded-qera", {**SHARDED, **NF4}, {}, "qera", {**RANK, "batches": 2}),
    Case("sharded-mini", {**SHARDED, "sharding": "stage2", "optim": "adamw_mini"}),
    Case("sharded-8bit", {**SHARDED, "sharding": "stage1", "optim": "adamw_8bit"}),
]
HALF = [
    Case("half-tensor", {**TENSOR, "bf16": True}, {}, "lora", RANK),
    Case("half-stages", {**STAGES, "bf16": True}, {}, "lora", RANK),
    Case("half-sharded", {**SHARDED, "bf16": True}, {}, "lora", RANK),
]
METHODS = {
    "adalora": {"tinit": 2, "tfinal": 4},
    "lora_ga": {"rank": 4, "ga_batches": 2},
    "lora_use_mixer": RANK,
    "loftq": RANK,
    "qera": {"rank": 4, "batches": 2},
    "sora": RANK,
    "vera": {"rank": 8},
    "lokr": {"rank": 2, "factor": 4},
    "loha": {"rank": 2},
    "miss": RANK,
    "hira": RANK,
    "shira": RANK,
    "boft": {"butterfly_factors": 2},
    "ia3": {},
    "trainable_tokens": {"indices": (5, 40, 7)},
    "hra": {"rank": 4},
    "ln_tuning": {},
    "oft": {"block_size": 4},
    "reft": RANK,
}
EVERY_METHOD = [
    Case(f"{layout}-{switch}", {**keys, **NF4}, WIDE, switch, options)
    for layout, keys in (("tensor", TENSOR), ("stages", STAGES))
    for switch, options in METHODS.items()
]
WEIGHTS = {"bf16": True, "fp16_opt_level": "O2"}
ROUNDED = {**WEIGHTS, "master_weight": False}
HALF_WEIGHTS = [
    Case("weights-tensor", {**TENSOR, **ROUNDED}),
    Case("weights-sequence", {**TENSOR, **WEIGHTS, "sequence_parallel": True}),
    Case("weights-stages", {**STAGES, **ROUNDED}, {"tie_word_embeddings": True}),
    Case("weights-data", ROUNDED),
    Case("weights-stage1", {**SHARDED, **ROUNDED, "sharding": "stage1", "optim": "adamw_8bit"}),
    Case("weights-stage2", {**SHARDED, **WEIGHTS, "sharding": "stage2"}),
    Case("weights-stage3", {**SHARDED, **ROUNDED}),
    Case("weights-wide-gradients", {**SHARDED, **WEIGHTS, "sharding": "stage2", "amp_master_grad": True}),
    Case(
        "weights-stages-wide-gradients", {**STAGES, **WEIGHTS, "amp_master_grad": True}, {"tie_word_embeddings": True}
    ),
]
IN_HALF = [*HALF, *HALF_WEIGHTS] if bf16.unavailable_reason() is None else []


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized_layouts")
    return folder, launch(2, [*QUANTIZED, *REPLICATED, *IN_HALF], folder, timeout=600)


@pytest.mark.parametrize("case", [*QUANTIZED, *REPLICATED], ids=lambda case: case.name)
def test_quantized_base_on_two_processes_matches_one_process(runs, case):
    folder, outcomes = runs
    single = case.on_one_process(data_ranks=2 if case in REPLICATED else 1)
    run_case(single, folder)
    assert_same_run(outcomes[case.name], outcome(single, folder))


@pytest.mark.slow
def test_quantized_base_with_every_method_matches_one_process(tmp_path):
    outcomes = launch(2, EVERY_METHOD, tmp_path, timeout=600)
    for case in EVERY_METHOD:
        run_case(case.on_one_process(), tmp_path)
        # Matrices that start from zero are small after ten steps, so that rounding is a larger fraction of them.
        assert_same_run(outcomes[case.name], outcome(case.on_one_process(), tmp_path), tolerance=3e-5)


@pytest.mark.skipif(bf16.unavailable_reason() is not None, reason="bfloat16 on the CPU needs the C++ library")
@pytest.mark.parametrize("case", HALF_WEIGHTS, ids=lambda case: case.name)
def test_bfloat16_weights_on_two_processes_match_within_rounding(runs, case):
    folder, outcomes = runs
    replicas = 1 if case.name.startswith(("weights-tensor", "weights-sequence", "weights-stages")) else 2
    single = case.on_one_process(data_ranks=replicas)
    run_case(single, folder)
    relative = differences(outcomes[case.name], outcome(single, folder))
    assert relative["losses"] < 2e-2 and relative["evaluation"] < 2e-2, relative


@pytest.mark.skipif(bf16.unavailable_reason() is not None, reason="bfloat16 on the CPU needs the C++ library")
@pytest.mark.parametrize("case", HALF, ids=lambda case: case.name)
def test_bfloat16_base_on_two_processes_matches_within_rounding(runs, case):
    folder, outcomes = runs
    single = case.on_one_process(data_ranks=2 if case.name == "half-sharded" else 1)
    run_case(single, folder)
    relative = differences(outcomes[case.name], outcome(single, folder))
    assert relative["losses"] < 2e-3 and relative["evaluation"] < 2e-3, relative


def test_shards_through_quantization_blocks_raise_before_weights_are_read(tmp_path):
    AutoModelForCausalLM.from_config(TINY_LLAMA).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model = build_skeleton(ModelSource.resolve(tmp_path))
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.down_proj: nf4 in blocks of 64 cannot be sharded"):
        check_tensor_plan(model, 2, QuantizationConfig(algo="nf4"))
    check_tensor_plan(model, 2, QuantizationConfig(algo="nf4", block_size=8))
    check_tensor_plan(model, 2, None)
