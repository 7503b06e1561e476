"""Estimate the peak memory of a run from its configuration and the shapes of its model, without reading weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import paddle

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.parallel_degrees import Degrees
from paddlenlp_ext.config.sections.precision import PrecisionConfig
from paddlenlp_ext.devices import capabilities, place_of
from paddlenlp_ext.models.auto import build_skeleton
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.linear_divergence import ROWS_PER_CHUNK
from paddlenlp_ext.ops.triton_utils.launch import on_gpu_with_triton
from paddlenlp_ext.parallel.expert_parallel import check_experts
from paddlenlp_ext.parallel.pipeline.cost_model import FlopEstimate
from paddlenlp_ext.parallel.pipeline.stages import plan_stages
from paddlenlp_ext.parallel.tensor_parallel import check_tensor_plan
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.quantization.quantize_model import NOTHING_QUANTIZED, PackedSize, packed_size
from paddlenlp_ext.sharding_spec import is_materialized
from paddlenlp_ext.trainer.build_model import adapt_model, weight_dtype
from paddlenlp_ext.trainer.distillation.teacher import find_teacher, is_base_of, teacher_dtype
from paddlenlp_ext.trainer.memory.estimate import MemoryEstimate, estimate_memory
from paddlenlp_ext.trainer.memory.layer_activations import (
    CPU_BF16,
    CPU_CPP,
    CPU_PADDLE,
    GPU,
    GPU_AUTOCAST,
    GPU_HALF,
    Numerics,
)
from paddlenlp_ext.trainer.memory.process_share import ProcessShare, process_shares
from paddlenlp_ext.trainer.memory.recurrent_states import decoding_state_bytes
from paddlenlp_ext.trainer.memory.sampling_cache import sampling_bytes
from paddlenlp_ext.trainer.optimizers.parameter_groups import trainable_parameters

_DIVERGENCE_TENSORS = 7
"""Number of float32 tensors [rows, vocabulary] that a chunk of the divergence holds at the same time."""


@dataclass(frozen=True)
class ModelOutline:
    """Model whose parameters have shapes but no values.

    Attributes:
        model: the decoder with its adapter, not quantized.
        num_base_parameters: number of parameters of the decoder without its adapter.
        packed: size of the weights that are stored quantized or quantized while loading.
        source: files of the decoder.
        degrees: parallel degrees by which `estimate_run` shards the model.
    """

    model: CausalLM | PeftModel
    num_base_parameters: int
    packed: PackedSize
    source: ModelSource
    degrees: Degrees = field(default_factory=Degrees)


def outline_model(source: ModelSource, config: RunConfig, degrees: Degrees | None = None) -> ModelOutline:
    """Build the model of a run without weights, and check that its shapes can be divided by `degrees`.

    Raises:
        ValueError: the model's shapes cannot be divided, or a pattern of weight_quantize_algo matches no layer.
    """
    degrees = degrees or Degrees()
    base = build_skeleton(source)
    check_tensor_plan(base, degrees.tensor, source.quantization)
    check_experts(base.config, degrees.expert, degrees.tensor)
    if degrees.pipeline > 1:
        plan_stages(base.config, degrees.pipeline, config.parallel.virtual_pp_degree)
    num_base_parameters = sum(math.prod(parameter.shape) for parameter in base.parameters())
    packed = NOTHING_QUANTIZED if source.quantization is None else packed_size(base, source.quantization)
    with paddle.LazyGuard():
        return ModelOutline(adapt_model(base, config), num_base_parameters, packed, source, degrees)


def estimate_run(
    config: RunConfig, outline: ModelOutline, micro_batch_tokens: int, target_tokens: int, num_states: int = 0
) -> MemoryEstimate:
    """Estimate the peak memory of a training step on the process that needs the most memory.

    If the model is sharded over several processes, `outline.model` is changed to the shard of one process.

    Args:
        config: the run's configuration.
        outline: the model's shapes.
        micro_batch_tokens: positions of the largest micro-batch, padding included.
        target_tokens: target tokens of the largest micro-batch.
        num_states: documents of the largest micro-batch if one continues another, else 0.
    """
    model, num_micro = outline.model, config.train.gradient_accumulation_steps
    num_elements = _num_elements(model)
    work = FlopEstimate(target_tokens / micro_batch_tokens, trains_matrices=config.peft is None)
    shares = process_shares(model, outline.degrees, config.parallel, num_micro, work)
    estimates = []
    for share in shares:
        held = _num_elements(model) / max(1, num_elements)
        packed = PackedSize(round(outline.packed.num_weights * held), round(outline.packed.num_bytes * held))
        sizes = (micro_batch_tokens, target_tokens, num_states)
        estimates.append(_estimate_process(config, outline, *sizes, packed, share))
    return max(estimates, key=lambda estimate: estimate.total)


def _num_elements(model: CausalLM | PeftModel) -> int:
    """Return the number of elements in this process's frozen decoder matrices, which can be quantized."""
    return sum(
        math.prod(parameter.shape)
        for name, parameter in model.named_parameters()
        if ".layers." in name and parameter.stop_gradient and len(parameter.shape) > 1 and is_materialized(parameter)
    )


def _estimate_process(
    config: RunConfig,
    outline: ModelOutline,
    micro_batch_tokens: int,
    target_tokens: int,
    num_states: int,
    packed: PackedSize,
    share: ProcessShare,
) -> MemoryEstimate:
    model = outline.model
    bytes_per_weight = 4 if weight_dtype(config) == "float32" else 2
    estimate = estimate_memory(
        model,
        micro_batch_tokens=micro_batch_tokens,
        target_tokens=target_tokens,
        recompute=RecomputePlan.from_config(config.train),
        numerics=_numerics(config.precision),
        num_states=num_states,
        accumulates=config.train.gradient_accumulation_steps > 1,
        bytes_per_weight=bytes_per_weight,
        optim=config.optim.optim,
        master_weight=config.precision.master_weight,
        float32_gradients=config.precision.float32_gradients,
        packed=packed,
        share=share,
    )
    if config.distills:
        return _with_teacher(estimate, config, outline, target_tokens)
    keeps = config.preference is not None and config.preference.keeps_reference
    if not keeps and (config.grpo is None or not config.grpo.has_reference):
        return estimate
    trained = sum(math.prod(parameter.shape) for parameter in trainable_parameters(model).values())
    copied = trained * (bytes_per_weight if config.peft is None else 4)  # adapter weights are float32
    return replace(estimate, weights=estimate.weights + copied)


def _with_teacher(
    estimate: MemoryEstimate, config: RunConfig, outline: ModelOutline, target_tokens: int
) -> MemoryEstimate:
    """Add the teacher's weights, if the steps need a copy of them, and the temporary tensors of the divergence.

    The activations of the teacher are not added: its forward pass saves none, and takes less than the backward pass.
    """
    distillation = config.distillation
    assert distillation is not None, "the run must be a distillation"
    chunk = min(target_tokens, ROWS_PER_CHUNK) * outline.model.config.vocab_size * 4 * _DIVERGENCE_TENSORS
    estimate = replace(estimate, working=max(estimate.working, chunk))
    if distillation.teacher_logps_path is not None:
        return estimate
    teacher = find_teacher(distillation)
    if is_base_of(outline.model, config, outline.source, teacher):
        return estimate
    source = teacher.source
    skeleton = build_skeleton(source)
    num_weights = sum(math.prod(parameter.shape) for parameter in skeleton.parameters())
    packed = NOTHING_QUANTIZED if source.quantization is None else packed_size(skeleton, source.quantization)
    bytes_per_weight = 4 if teacher_dtype(config.precision) == "float32" else 2
    weights = (num_weights - packed.num_weights) * bytes_per_weight + packed.num_bytes
    return replace(estimate, weights=estimate.weights + weights)


def estimate_decoding_state(config: RunConfig, outline: ModelOutline) -> int:
    """Return the bytes of the state of one row while decoding, in all layers that have a state instead of keys."""
    return decoding_state_bytes(outline.model, _numerics(config.precision).linear_dtype)


def estimate_sampling(config: RunConfig, outline: ModelOutline, num_rows: int, num_positions: int) -> int:
    """Return the bytes of the cache and the logits of a process that samples completions.

    Args:
        config: the run's configuration.
        outline: the model's shapes, not sharded.
        num_rows: maximum number of completions that the process samples at the same time.
        num_positions: number of tokens of the longest prompt with its completion; the model's context limits it.
    """
    num_positions = min(num_positions, outline.model.config.max_context)
    return sampling_bytes(outline.model, num_rows, num_positions, _numerics(config.precision).linear_dtype)


def _numerics(precision: PrecisionConfig) -> Numerics:
    """Return the dtypes and fused ops of the configured device and precision."""
    is_half = precision.compute_dtype != "float32"
    if not capabilities(precision.device).cpp:
        on_gpu = GPU if not is_half else GPU_AUTOCAST if precision.fp16_opt_level == "O1" else GPU_HALF
        return replace(on_gpu, triton=_runs_triton(precision.device))
    if library.unavailable_reason() is not None:
        return CPU_PADDLE
    return CPU_BF16 if is_half else CPU_CPP


def _runs_triton(device: str) -> bool:
    """Return whether ops use Triton kernels on a device; for a GPU that this machine lacks, assume a Hopper GPU."""
    return on_gpu_with_triton(cast("Any", SimpleNamespace(place=place_of(device)))) is None
