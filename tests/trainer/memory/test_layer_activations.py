"""Estimated activations against the tensors that exist after a forward pass, measured by Paddle's allocator."""

from __future__ import annotations

import dataclasses
import gc
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.ops.cpp import bf16, library
from paddlenlp_ext.ops.gated_delta_rule import gated_delta_rule_op
from paddlenlp_ext.ops.kimi_delta_rule import kimi_delta_rule_op
from paddlenlp_ext.ops.state_space_duality import state_space_duality_op
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.trainer.memory.layer_activations import CPU_BF16, CPU_CPP, CPU_PADDLE, ActivationModel, Numerics
from paddlenlp_ext.trainer.memory.saved_inputs import saved_inputs
from tests.common.adapters import default_config
from tests.common.models import TINY_LATENT, TINY_LLAMA
from tests.common.training import VOCABULARY
from tests.trainer.memory.allocated import allocated_bytes

SHAPE = {**TINY_LLAMA, "hidden_size": 64, "intermediate_size": 160}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_MOE = {
    "model_type": "qwen2_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 64,
}
GEMMA_4_SIZES = {
    "model_type": "gemma4_text",
    "head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["full_attention"] * 2,
    "per_layer_config": {},
    "sliding_window": 64,
}
GEMMA_4 = {
    "values": {},
    "keys as values": {"attention_k_eq_v": True},
    "experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    "layer embeddings": {"hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": VOCABULARY},
}
_DELTA = {"model_type": "qwen3_5_text", "head_dim": 16, "layer_types": ["linear_attention"] * 2}
_MAMBA = {
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba"] * 2,
    "num_local_experts": 0,
    "shared_intermediate_size": 160,
}
_BESIDE_ATTENTION = {
    "model_type": "falcon_h1",
    "mamba_d_ssm": 96,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
}


def delta(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> dict[str, Any]:
    """Return the differences of a model whose layers all have gated delta nets."""
    heads = {"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads}
    return {**_DELTA, **heads, "linear_key_head_dim": key_dim, "linear_value_head_dim": value_dim}


OTHER_MIXERS = {
    "short convolutions": {"model_type": "lfm2", "layer_types": ["conv"] * 2, "block_auto_adjust_ff_dim": False},
    "gated delta nets": delta(2, 4, 16, 32),
    "gated delta nets with more keys": delta(4, 4, 32, 16),
    "Mamba-2": {**_MAMBA, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 16},
    "Mamba-2 with one group": {**_MAMBA, "mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 32},
    "Kimi delta attention": {
        **TINY_LATENT,
        "model_type": "kimi_linear",
        "layer_types": ["linear_attention"] * 2,
        "first_k_dense_replace": 3,
        "linear_num_heads": 4,
        "linear_head_dim": 32,
    },
    "Mamba-2 beside attention": _BESIDE_ATTENTION,
    "Mamba-2 with multipliers": {
        **_BESIDE_ATTENTION,
        "mamba_rms_norm": True,
        "attention_in_multiplier": 0.7,
        "attention_out_multiplier": 1.2,
        "ssm_in_multiplier": 0.8,
        "ssm_out_multiplier": 1.1,
        "ssm_multipliers": [0.7, 0.8, 0.9, 1.1, 1.2],
        "mlp_multipliers": [0.9, 0.8],
    },
}
OPS_OF_MIXERS = {"gated": gated_delta_rule_op, "Kimi": kimi_delta_rule_op, "Mamba-2": state_space_duality_op}
ON_EXPERTS = LoRAConfig(rank=8, target_parameters=["experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight"])
OPS = CPU_PADDLE if library.unavailable_reason() else CPU_CPP
# Not estimated: scales of two norms, and the softmax sums of four heads, which are recomputed in plain Paddle.
PER_POSITION = 4 * (2 if OPS is CPU_PADDLE else 4 + 2)
METHODS = sorted(peft_methods())
needs_bf16 = pytest.mark.skipif(bf16.unavailable_reason() is not None, reason=f"{bf16.unavailable_reason()}")


@pytest.fixture(scope="module", autouse=True)
def freeze_other_garbage():
    """Exclude objects of other tests from garbage collection, which runs six times in each test here."""
    gc.collect()
    gc.freeze()


def build(method: PeftConfig | None, num_layers: int = 2):
    shape = {**SHAPE, "num_hidden_layers": num_layers}
    if "layer_types" in shape:
        shape["layer_types"] = shape["layer_types"][:1] * num_layers
    model = AutoModelForCausalLM.from_config(shape, seed=1)
    return model if method is None else get_peft_model(model, method)


def config_of(switch: str) -> PeftConfig:
    """Return a method with its defaults, of rank 8 if it has a rank."""
    method = peft_methods()[switch]
    has_rank = "rank" in {field.name for field in dataclasses.fields(method)}
    return default_config(switch, **({"rank": 8} if has_rank else {}))


def bytes_saved(model: paddle.nn.Layer, length: int, around: AbstractContextManager[None]) -> int:
    """Return the bytes of tensors that exist after a forward pass."""
    ids = paddle.to_tensor(np.random.default_rng(0).integers(1, VOCABULARY, (1, length)))
    before = allocated_bytes()
    with around:
        hidden = model.hidden_states(ids)
    after = allocated_bytes()
    assert not hidden.stop_gradient
    return after - before


def measured_in_a_layer(method: PeftConfig | None, prepare=lambda model: None, around=nullcontext) -> float:
    """Return the bytes per token that a third layer adds; shapes are small enough that no block is rounded up."""
    per_token = []
    for num_layers in (2, 3):
        model = build(method, num_layers)
        model.train()
        prepare(model)
        bytes_saved(model, 64, around())  # allocates tables and scratch buffers, which are made once
        # Tensors of earlier tests may be freed during a forward pass, so the median of three passes counts.
        short, long = (sorted(bytes_saved(model, length, around()) for _ in range(3))[1] for length in (64, 128))
        per_token.append((long - short) / 64)
    return per_token[1] - per_token[0]


def predicted(method: PeftConfig | None, numerics: Numerics, plan: RecomputePlan | None = None) -> float:
    model = build(method)
    layers = ActivationModel(model.config, plan, numerics, saved_inputs(model, numerics))
    return layers.saved([0, 1]) - layers.saved([0])


@pytest.mark.parametrize("method", [None, LoRAConfig(rank=8)], ids=["all weights", "LoRA"])
def test_activations_of_a_layer_equal_the_estimate(method: PeftConfig | None):
    assert measured_in_a_layer(method) == pytest.approx(predicted(method, OPS) + PER_POSITION, abs=4)


@pytest.mark.parametrize(
    "changes",
    [{"model_type": "ernie4_5"}, {"model_type": "phi3", "partial_rotary_factor": 0.5}],
    ids=["interleaved", "partial"],
)
def test_activations_with_interleaved_or_partial_rotation_are_near_the_estimate(changes, monkeypatch):
    """Compare with an estimate for separate ops: the attention block of Ernie saves 3 % less."""
    monkeypatch.setattr("tests.trainer.memory.test_layer_activations.SHAPE", {**SHAPE, **changes})
    measured, expected = measured_in_a_layer(None), predicted(None, OPS) + PER_POSITION
    assert measured - 4 <= expected <= 1.04 * measured


@pytest.mark.parametrize("method", [None, LoRAConfig(rank=8)], ids=["all weights", "LoRA"])
def test_activations_of_latent_attention_equal_the_estimate(method: PeftConfig | None, monkeypatch):
    changes = {**TINY_LATENT, "q_lora_rank": 24, "kv_lora_rank": 32, "first_k_dense_replace": 3}
    monkeypatch.setattr("tests.trainer.memory.test_layer_activations.SHAPE", {**SHAPE, **changes})
    scales = 2 * 4  # of the norms of the latents
    assert measured_in_a_layer(method) == pytest.approx(predicted(method, OPS) + PER_POSITION + scales, abs=4)


@pytest.mark.parametrize("method", [None, LoRAConfig(rank=8), ON_EXPERTS], ids=["all weights", "LoRA", "on experts"])
@pytest.mark.parametrize("changes", [MIXTRAL, QWEN_MOE], ids=["mixtral", "qwen2_moe"])
def test_activations_of_experts_are_near_the_estimate(method: PeftConfig | None, changes, monkeypatch):
    """Compare with an estimate that leaves out the routers' scores and choices."""
    monkeypatch.setattr("tests.trainer.memory.test_layer_activations.SHAPE", {**SHAPE, **changes})
    measured, expected = measured_in_a_layer(method), predicted(method, OPS) + PER_POSITION
    assert measured - 4 * 8 * changes["num_experts_per_tok"] * 2 <= expected <= measured


@pytest.mark.parametrize("method", [None, LoRAConfig(rank=8)], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("changes", GEMMA_4.values(), ids=list(GEMMA_4))
def test_activations_of_normed_values_and_experts_beside_are_near_the_estimate(changes, method, monkeypatch):
    """Compare with an estimate that leaves out the scales of norms, and the routers' scores and choices."""
    monkeypatch.setattr("tests.trainer.memory.test_layer_activations.SHAPE", {**SHAPE, **GEMMA_4_SIZES, **changes})
    measured, expected = measured_in_a_layer(method), predicted(method, OPS) + PER_POSITION
    assert 0.97 * measured <= expected <= measured


@pytest.mark.parametrize("changes", OTHER_MIXERS.values(), ids=list(OTHER_MIXERS))
def test_activations_of_other_mixers_are_near_the_estimate(changes, monkeypatch):
    """Compare with an estimate that leaves out values with one element per head, and the scales of norms."""
    monkeypatch.setattr("tests.trainer.memory.test_layer_activations.SHAPE", {**SHAPE, **changes})
    measured, expected = measured_in_a_layer(None), predicted(None, OPS)
    assert 0.96 * measured <= expected <= 1.01 * measured


@pytest.mark.skipif(OPS is CPU_PADDLE, reason="compares the reference with the C++ library")
@pytest.mark.parametrize("mixers", [name for name in OTHER_MIXERS if name != "short convolutions"])
def test_activations_of_the_reference_of_a_recurrence_are_near_the_estimate(mixers, monkeypatch):
    """Compare the additional activations; values with one element per head are not estimated."""
    monkeypatch.setattr("tests.trainer.memory.test_layer_activations.SHAPE", {**SHAPE, **OTHER_MIXERS[mixers]})
    mixer, _ = build(None).config.other_mixers
    op = next(op for kind, op in OPS_OF_MIXERS.items() if mixers.startswith(kind))
    found = measured_in_a_layer(None, around=lambda: op.restricted_to("reference"))
    added = found - measured_in_a_layer(None)
    expected = 4 * (mixer.saved_size(in_cpp=False) - mixer.saved_size(in_cpp=True))
    assert 0 <= added - expected <= 4 * 6 * 8


@needs_bf16
@pytest.mark.parametrize("method", [None, LoRAConfig(rank=8)], ids=["all weights", "LoRA"])
def test_activations_of_bf16_products_equal_the_estimate(method: PeftConfig | None):
    measured = measured_in_a_layer(method, around=bf16.bf16_matmuls)
    assert measured == pytest.approx(predicted(method, CPU_BF16) + PER_POSITION, abs=4)
    assert measured < 0.8 * predicted(method, CPU_CPP)


def test_activations_of_few_target_modules_equal_the_estimate():
    method = LoRAConfig(rank=8, target_modules=("q_proj", "down_proj"))
    assert measured_in_a_layer(method) == pytest.approx(predicted(method, OPS) + PER_POSITION, abs=4)


@pytest.mark.parametrize("switch", METHODS)
def test_activations_of_every_method_are_near_the_estimate(switch: str):
    measured, expected = measured_in_a_layer(config_of(switch)), predicted(config_of(switch), OPS) + PER_POSITION
    assert measured - 4 <= expected <= 1.2 * measured


def test_activations_with_dropout_are_near_the_estimate():
    """Compare with an estimate that also counts the undropped input, which PiSSA saves and LoRA does not."""
    method = LoRAConfig(rank=8, dropout=0.1)
    measured, expected = measured_in_a_layer(method), predicted(method, OPS) + PER_POSITION
    assert measured - 4 <= expected <= 1.25 * measured


@pytest.mark.parametrize(
    "plan",
    [
        RecomputePlan(),
        RecomputePlan("full_attn"),
        RecomputePlan(saved_regions={"mlp_row_ln": -1}),
        RecomputePlan(saved_regions={"attention_column_ln": -1, "flash_attn": -1}),
        RecomputePlan(saved_regions={"mlp_row_ln": -1}, offloads_inputs=True),
    ],
    ids=["full", "full_attn", "mlp_row_ln", "q, k, v, attention", "mlp_row_ln, inputs off the device"],
)
def test_activations_with_recompute_are_near_the_estimate(plan: RecomputePlan):
    measured = measured_in_a_layer(LoRAConfig(rank=8), lambda model: model.base_model.enable_recompute(plan))
    expected = predicted(LoRAConfig(rank=8), OPS, plan)
    assert measured == pytest.approx(expected + PER_POSITION, rel=0.15)


def test_activations_with_inputs_off_the_device_are_none():
    plan = RecomputePlan(offloads_inputs=True)
    measured = measured_in_a_layer(LoRAConfig(rank=8), lambda model: model.base_model.enable_recompute(plan))
    assert measured == predicted(LoRAConfig(rank=8), OPS, plan) == 0
