"""The memory estimate moves with what it is made of; benchmarks/memory.py holds it against measurements."""

from __future__ import annotations

import dataclasses
import math

import pytest
from tiny_training import make_config, make_model

from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.quant.model import packed_size, quantize_linears, quantized_linears
from paddlenlp_ext.quant.options import QuantOptions
from paddlenlp_ext.train.memory import estimate_memory
from paddlenlp_ext.train.optim import build_optimizer, trainable_parameters
from paddlenlp_ext.train.optimizer_state import optimizer_state

STEP = {"micro_batch_tokens": 1000, "learned_tokens": 300, "recompute": None}


def test_full_training_counts_every_weight():
    model = make_model()
    size = sum(math.prod(p.shape) for p in model.parameters())
    estimate = estimate_memory(model, **STEP, accumulates=True)
    assert (estimate.weights, estimate.gradients, estimate.optimizer) == (4.0 * size, 4.0 * size, 8.0 * size)
    parts = [getattr(estimate, field.name) for field in dataclasses.fields(estimate)]
    assert estimate.total == pytest.approx(sum(parts)) and all(part >= 0 for part in parts)


def test_half_precision_weights_bring_fp32_copies():
    size = sum(math.prod(p.shape) for p in make_model().parameters())
    estimate = estimate_memory(make_model(), **STEP, bytes_per_weight=2)
    assert (estimate.weights, estimate.optimizer) == (2.0 * size, 12.0 * size)


def test_an_adapter_has_little_besides_activations():
    full, lora = estimate_memory(make_model(), **STEP), estimate_memory(make_model(lora=True), **STEP)
    assert lora.optimizer < full.optimizer and lora.loss < full.loss
    assert lora.activations > full.activations  # the adapter keeps its inner vectors too


def test_activations_follow_the_tokens_and_recompute_keeps_little():
    model = make_model(lora=True)
    once, twice = (estimate_memory(model, **(STEP | {"micro_batch_tokens": n})).activations for n in (1000, 2000))
    assert twice == 2 * once
    assert estimate_memory(model, **(STEP | {"recompute": RecomputePlan()})).activations < once


@pytest.mark.parametrize(
    "algo", ["nf4", "weight_only_int4", {"q_proj": "weight_only_int8", "down_proj": "fp4"}], ids=str
)
@pytest.mark.parametrize("double", [False, True])
def test_quantized_weights_count_as_they_are_stored(algo, double: bool):
    options = QuantOptions(algo=algo, block_size=22, double_quant=double, double_quant_block_size=10)
    plain, quantized = make_model(), make_model()
    packed = packed_size(plain, options)
    quantize_linears(quantized, options)
    layers = quantized_linears(quantized).values()
    assert packed.num_weights == sum(layer.in_features * layer.out_features for layer in layers)
    assert packed.num_bytes == sum(layer.num_bytes for layer in layers)
    kept = sum(math.prod(p.shape) for p in quantized.parameters())
    assert estimate_memory(plain, **STEP, packed=packed).weights == 4 * kept + packed.num_bytes


@pytest.mark.parametrize("optim", ["adamw", "adamw_mini", "adamw_8bit"])
@pytest.mark.parametrize("model", [make_model(), make_model(lora=True, rank=150)], ids=["full", "LoRA"])
def test_the_optimizers_part_is_what_it_keeps(tmp_path, model, optim: str):
    optimizer = build_optimizer(model, make_config(tmp_path, optim=optim).optim)
    state = optimizer_state(optimizer, trainable_parameters(model))
    counters = ("step", "beta1_pow_acc", "beta2_pow_acc")
    kept = sum(tensor.numpy().nbytes for name, tensor in state.items() if not name.endswith(counters))
    assert estimate_memory(model, **STEP, optim=optim).optimizer == kept


def test_every_way_to_recompute_has_its_place_between_all_and_nothing():
    """The tiny Llama, numbers a token: D 32, I 48, queries and attention's result 32 each, keys and values 16 each."""

    def floats(plan: RecomputePlan | None) -> float:
        return estimate_memory(make_model(), **(STEP | {"recompute": plan})).activations / 4.0 / 1000

    layer = 4 * 32 + 96 + 3 * 48
    assert floats(None) == 2 * layer == floats(RecomputePlan("core_attn"))
    assert floats(RecomputePlan()) == 2 * 32 + layer
    assert floats(RecomputePlan("full_attn")) == 2 * (layer - 96) + 96
    assert floats(RecomputePlan(left_out=frozenset({1}))) == 32 + layer + layer
    assert floats(RecomputePlan(kept={"mlp_row_ln": 1})) == 2 * 32 + layer + (48 + 32)
    assert floats(RecomputePlan(kept={"attention_column_ln": -1})) == 2 * (32 + 32 + 64) + layer
    assert floats(RecomputePlan(kept={"flash_attn": -1, "attention_row_ln": 1})) == 2 * (32 + 96) + 64 + layer
