"""Memory estimate: each part follows its inputs, and the total is near the peak of a process.

test_activations.py counts saved activations; benchmarks/memory.py compares the total with measurements.
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys

import pytest

from paddlenlp_ext.config.sections.precision import PrecisionConfig
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import packed_size, quantize_linears, quantized_layers
from paddlenlp_ext.trainer.memory import estimate as estimate_module
from paddlenlp_ext.trainer.memory.estimate import estimate_memory
from paddlenlp_ext.trainer.memory.layer_activations import CPU_BF16, CPU_CPP, CPU_PADDLE, GPU_AUTOCAST, GPU_HALF
from paddlenlp_ext.trainer.optimizers.build_optimizer import build_optimizer, build_rounding
from paddlenlp_ext.trainer.optimizers.optimizer_state import optimizer_state
from paddlenlp_ext.trainer.optimizers.parameter_groups import trainable_parameters
from tests.common.models import TINY_LLAMA
from tests.common.training import VOCABULARY, make_config, make_model

STEP = {"micro_batch_tokens": 1000, "target_tokens": 300, "recompute": None, "numerics": CPU_PADDLE}
HEAD = 4.0 * VOCABULARY * 32  # bytes of the tied table


def size_of(model) -> int:
    return sum(math.prod(p.shape) for p in model.parameters())


def test_estimate_memory_full_training_counts_every_weight():
    model = make_model()
    size = size_of(model)
    estimate = estimate_memory(model, **STEP, accumulates=True)
    assert (estimate.weights, estimate.optimizer) == (4.0 * size, 8.0 * size)
    # While micro-batches accumulate, lm_head's new gradient and the table's sum for both uses exist at once.
    assert estimate.gradients == pytest.approx(4.0 * size + 2 * HEAD)
    parts = [getattr(estimate, field.name) for field in dataclasses.fields(estimate)]
    assert estimate.total == pytest.approx(sum(parts)) and all(part >= 0 for part in parts)


def test_estimate_memory_gradients_reuse_the_memory_of_activations():
    """Check that gradients other than lm_head's reuse activations' memory, which is too small for few tokens."""
    model = make_model()
    assert estimate_memory(model, **STEP).gradients == pytest.approx(HEAD)
    few = estimate_memory(model, **(STEP | {"micro_batch_tokens": 1, "target_tokens": 1}))
    assert few.gradients + few.activations + few.working == pytest.approx(4.0 * size_of(model) + HEAD)


def test_estimate_memory_half_precision_weights_have_fp32_copies():
    size = size_of(make_model())
    estimate = estimate_memory(make_model(), **(STEP | {"numerics": GPU_HALF}), bytes_per_weight=2)
    assert (estimate.weights, estimate.optimizer) == (2.0 * size, 12.0 * size)


def test_estimate_memory_float32_gradients_of_half_weights_take_twice_the_bytes():
    size, step = size_of(make_model()), STEP | {"numerics": GPU_HALF, "bytes_per_weight": 2, "accumulates": True}
    half, wide = (estimate_memory(make_model(), **step, float32_gradients=flag) for flag in (False, True))
    # The gradient of the tied table exists twice while micro-batches accumulate.
    assert wide.gradients - half.gradients == pytest.approx(2.0 * size + HEAD / 2)
    assert (wide.weights, wide.optimizer) == (half.weights, half.optimizer)


def test_estimate_memory_cpu_stores_only_frozen_matrices_in_half():
    model = make_model(lora=True)
    frozen = sum(math.prod(p.shape) for p in model.parameters() if p.stop_gradient and p.ndim == 2)
    estimate = estimate_memory(model, **(STEP | {"numerics": CPU_BF16}), bytes_per_weight=2)
    trained = sum(math.prod(p.shape) for p in trainable_parameters(model).values())
    assert estimate.weights == 4.0 * size_of(model) - 2.0 * frozen
    assert estimate.optimizer == 8.0 * trained


@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit", "muon"])
@pytest.mark.parametrize("master_weight", [True, False])
def test_estimate_memory_counts_trained_bf16_matrices_as_stored(tmp_path, optim, master_weight):
    """Compare with the tensors of a model in bfloat16: weights, optimizer state, and gradients."""
    half = AutoModelForCausalLM.from_config(TINY_LLAMA, seed=1, dtype="bfloat16")
    step = STEP | {"numerics": CPU_BF16, "optim": optim, "master_weight": master_weight}
    estimate = estimate_memory(make_model(), **step, bytes_per_weight=2, accumulates=True)
    parameters = trainable_parameters(half)
    assert estimate.weights == sum(p.size * p.element_size() for p in parameters.values())
    rounding = build_rounding(half, PrecisionConfig(master_weight=master_weight), 1)
    optimizer = build_optimizer(half, make_config(tmp_path, optim=optim).optim, rounding)
    state = {name: t for name, t in optimizer_state(optimizer, parameters).items() if "_pow_" not in name}
    counted = [t.size * t.element_size() for name, t in state.items() if not name.endswith(".step")]
    assert estimate.optimizer == sum(counted)
    single = estimate_memory(make_model(), **(STEP | {"numerics": CPU_CPP}), accumulates=True)
    assert estimate.gradients < single.gradients


def test_estimate_memory_counts_modules_to_save_as_stored():
    """Compare with the tensors of a bfloat16 base, whose trained modules are float32."""
    options = {"rank": 4, "modules_to_save": ["lm_head", "down_proj", "norm"]}
    half = AutoModelForCausalLM.from_config(TINY_LLAMA, seed=1, dtype="bfloat16")
    (adapted := get_peft_model(half, LoRAConfig(**options))).adapter.replaced.drop_base_values()
    estimate = estimate_memory(make_model(True, **options), **(STEP | {"numerics": CPU_BF16}), bytes_per_weight=2)
    assert estimate.weights == sum(p.size * p.element_size() for p in adapted.parameters())
    assert estimate.optimizer == 8.0 * sum(p.size for p in trainable_parameters(adapted).values())
    assert estimate.optimizer > 2 * HEAD


def test_estimate_memory_autocast_counts_cast_weights_and_inputs():
    model = make_model()
    plain, autocast = (
        estimate_memory(model, **(STEP | {"numerics": numerics})) for numerics in (GPU_HALF, GPU_AUTOCAST)
    )
    linears = size_of(model) - VOCABULARY * 32 - 5 * 32
    assert autocast.weights - plain.weights == 2.0 * linears
    assert autocast.activations > plain.activations


def test_estimate_memory_adapter_has_small_optimizer_and_gradients():
    full, lora = estimate_memory(make_model(), **STEP), estimate_memory(make_model(lora=True), **STEP)
    assert lora.optimizer < full.optimizer and lora.gradients < full.gradients
    assert lora.activations > full.activations  # the adapter also saves its inner vectors


def test_estimate_memory_activations_grow_with_tokens_and_shrink_with_recompute():
    model = make_model(lora=True)
    once, twice = (estimate_memory(model, **(STEP | {"micro_batch_tokens": n})).activations for n in (1000, 2000))
    assert twice == 2 * once
    assert estimate_memory(model, **(STEP | {"recompute": RecomputePlan()})).activations < once


def test_estimate_memory_cpu_library_holds_little_free():
    """Check the free memory: a sixteenth of the library's blocks, and all of the heap, which has the hidden states."""
    model = make_model(lora=True)
    plain, fast = (estimate_memory(model, **(STEP | {"numerics": numerics})) for numerics in (CPU_PADDLE, CPU_CPP))
    assert plain.allocator_cache == pytest.approx(1.75 * (plain.activations + plain.working + plain.gradients))
    heap = 4.0 * 1000 * 3 * 32
    assert fast.allocator_cache == pytest.approx(heap + (fast.activations + fast.working - heap) / 16)


@pytest.mark.parametrize(
    "algo", ["nf4", "weight_only_int4", {"q_proj": "weight_only_int8", "down_proj": "fp4"}], ids=str
)
@pytest.mark.parametrize("double", [False, True])
def test_estimate_memory_quantized_weights_count_as_stored(algo, double: bool):
    options = QuantizationConfig(algo=algo, block_size=22, double_quant=double, double_quant_block_size=10)
    plain, quantized = make_model(), make_model()
    packed = packed_size(plain, options)
    quantize_linears(quantized, options)
    layers = quantized_layers(quantized).values()
    assert packed.num_weights == sum(layer.in_features * layer.out_features for layer in layers)
    assert packed.num_bytes == sum(layer.num_bytes for layer in layers)
    stored = sum(math.prod(p.shape) for p in quantized.parameters())
    assert estimate_memory(plain, **STEP, packed=packed).weights == 4 * stored + packed.num_bytes


@pytest.mark.parametrize("optim", ["adamw", "adamw_mini", "adamw_8bit"])
@pytest.mark.parametrize("model", [make_model(), make_model(lora=True, rank=150)], ids=["full", "LoRA"])
def test_estimate_memory_optimizer_equals_its_state(tmp_path, model, optim: str):
    optimizer = build_optimizer(model, make_config(tmp_path, optim=optim).optim)
    state = optimizer_state(optimizer, trainable_parameters(model))
    counters = ("step", "beta1_pow_acc", "beta2_pow_acc")
    stored = sum(tensor.numpy().nbytes for name, tensor in state.items() if not name.endswith(counters))
    assert estimate_memory(model, **STEP, optim=optim).optimizer == stored


def test_estimate_memory_large_temporary_tensors_leave_no_free_memory(monkeypatch):
    """Check that the gradient of the embedding, if it is mapped, is not counted as retained."""
    step = STEP | {"numerics": CPU_CPP, "micro_batch_tokens": 1, "target_tokens": 1}
    on_heap = estimate_memory(make_model(), **step)
    monkeypatch.setattr(estimate_module, "_MMAP_THRESHOLD", HEAD)
    mapped = estimate_memory(make_model(), **step)
    assert on_heap.allocator_cache - mapped.allocator_cache == pytest.approx(HEAD)
    assert on_heap.total - mapped.total == pytest.approx(HEAD)


def test_estimate_memory_every_recompute_plan_counts_its_regions():
    """Count values per token of the tiny Llama: D 32, I 48, queries and attention output 32, keys and values 16."""

    def floats(plan: RecomputePlan | None, part: str = "activations") -> float:
        return getattr(estimate_memory(make_model(), **(STEP | {"recompute": plan})), part) / 4.0 / 1000

    layer, last = 4 * 32 + 96 + 3 * 48, 32
    assert floats(None) == 2 * layer + last == floats(RecomputePlan("core_attn"))
    assert floats(RecomputePlan()) == 2 * 32 + last
    assert floats(RecomputePlan(offloads_inputs=True)) == last
    assert floats(RecomputePlan(excluded_layers=frozenset({1}), offloads_inputs=True)) == layer + last
    assert floats(RecomputePlan("full_attn")) == 2 * (layer - 96) + last
    assert floats(RecomputePlan(excluded_layers=frozenset({1}))) == 32 + layer + last
    assert floats(RecomputePlan(saved_regions={"mlp_row_ln": 1})) == 2 * 32 + (48 + 32) + last
    assert floats(RecomputePlan(saved_regions={"attention_column_ln": -1})) == 2 * (32 + 32 + 64) + last
    assert floats(RecomputePlan(saved_regions={"flash_attn": -1, "attention_row_ln": 1})) == 2 * (32 + 96) + 64 + last
    # During the backward pass, one layer's activations exist.
    assert floats(RecomputePlan(), "working") - floats(None, "working") == pytest.approx(layer)


_PEAK_OF_TWO_STEPS = """
import json, sys
import numpy as np
from paddlenlp_ext import AutoModelForCausalLM, LoRAConfig, configure_runtime, get_peft_model
configure_runtime()
import paddle
shape, tokens, lora = json.loads(sys.argv[1])
model = AutoModelForCausalLM.from_config(shape, seed=1)
model = get_peft_model(model, LoRAConfig(rank=8)) if lora else model
model.train()
from paddlenlp_ext.data.collate import collate
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.trainer.forward_backward import loss_sum
from paddlenlp_ext.trainer.optimizers.fused_adamw import FusedAdamW
trained = [p for p in model.parameters() if not p.stop_gradient]
optimizer = FusedAdamW(parameters=[{"params": trained, "weight_decay": 0.0}])
ids = np.random.default_rng(0).integers(1, shape["vocab_size"], tokens + 1).astype(np.int32)
batch = collate([[EncodedRow(ids, np.ones(tokens + 1, bool), 0)]])
for _ in range(2):
    loss, _ = loss_sum(model, batch)
    loss.backward()
    optimizer.step()
    for parameter in trained:
        parameter.clear_gradient(False)
print(next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("lora", [pytest.param(True, marks=pytest.mark.layouts), False])
def test_estimate_memory_is_near_the_peak_of_a_process(lora: bool):
    from paddlenlp_ext import LoRAConfig, get_peft_model

    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 16, "vocab_size": 8000}
    shape, tokens = {**TINY_LLAMA, **sizes, "max_position_embeddings": 2048}, 2048
    command = [sys.executable, "-c", _PEAK_OF_TWO_STEPS, json.dumps([shape, tokens, lora])]
    measured = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    model = AutoModelForCausalLM.from_config(shape, seed=1)
    model = get_peft_model(model, LoRAConfig(rank=8)) if lora else model
    numerics = CPU_PADDLE if library.unavailable_reason() else CPU_CPP
    estimate = estimate_memory(
        model, micro_batch_tokens=tokens, target_tokens=tokens, recompute=None, numerics=numerics
    )
    assert estimate.total == pytest.approx(measured, rel=0.12)
    assert estimate.process < 0.5 * measured  # otherwise the process itself would dominate the peak


@pytest.mark.parametrize(("targets", "rows"), [(100_000, 2048), (1500, 1500)])
def test_estimate_memory_on_a_gpu_counts_the_chunk_of_the_triton_loss(monkeypatch, targets, rows):
    """Use a vocabulary of 128256 in bfloat16, of which 2048 rows are at most 512 MiB, without hidden states."""
    model = make_model()
    monkeypatch.setattr(type(model.config), "num_outputs", 128256, raising=False)
    step = STEP | {"micro_batch_tokens": 0, "target_tokens": targets}
    plain, triton = (
        estimate_memory(model, **(step | {"numerics": dataclasses.replace(GPU_HALF, triton=flag)})).working
        for flag in (False, True)
    )
    # In plain Paddle 256 rows in float32, with a rounded copy of the gradient.
    assert triton - plain == pytest.approx(128256 * (2.0 * rows - 6.0 * 256))
