"""Dry run: steps and memory of a run, from its configuration, its rows and the model's shapes; no weight is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any, cast

import paddle
from rich.console import Console
from rich.table import Table

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.device import has_gpu
from paddlenlp_ext.config.parallel_degrees import Degrees, complete_degrees
from paddlenlp_ext.config.sections.precision import PrecisionConfig
from paddlenlp_ext.config.sections.preference import PreferenceConfig
from paddlenlp_ext.data.sampler import DataOrder, StepBatch, build_data_order, packing_kind
from paddlenlp_ext.data.streaming.shuffle_window import StreamOrder
from paddlenlp_ext.models.auto import build_skeleton
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.ops.cpu import library
from paddlenlp_ext.ops.dispatch import AbsentGpu
from paddlenlp_ext.ops.triton_launch import on_gpu_with_triton
from paddlenlp_ext.parallel.expert_parallel import check_experts
from paddlenlp_ext.parallel.pipeline.cost_model import FlopEstimate
from paddlenlp_ext.parallel.pipeline.stages import plan_stages
from paddlenlp_ext.parallel.tensor_parallel import check_tensor_plan
from paddlenlp_ext.peft.parameter_count import describe_experts, describe_kinds
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.quantization.quantize_model import NOTHING_QUANTIZED, PackedSize, packed_size
from paddlenlp_ext.sharding_spec import is_materialized
from paddlenlp_ext.trainer.added_tokens import with_trained_tokens
from paddlenlp_ext.trainer.build import RunData, adapt_model, weight_dtype
from paddlenlp_ext.trainer.memory.estimate import MemoryEstimate, estimate_memory
from paddlenlp_ext.trainer.memory.layer_activations import (
    CPU_BF16,
    CPU_NATIVE,
    CPU_PADDLE,
    GPU,
    GPU_AUTOCAST,
    GPU_HALF,
    Numerics,
)
from paddlenlp_ext.trainer.memory.process_share import ProcessShare, process_shares
from paddlenlp_ext.trainer.optimizers.build_optimizer import trainable_parameters
from paddlenlp_ext.utils.distributed_env import world_size

_GB = 1e9


@dataclass(frozen=True)
class ModelOutline:
    """Model with the shapes of its parameters, without values.

    Attributes:
        model: the decoder with its adapter, not quantized.
        num_base_parameters: number of parameters of the decoder without its adapter.
        packed: size of the weights that are quantized while loading, or stored quantized.
        degrees: processes along each axis, among which `estimate_run` divides the model.
    """

    model: CausalLM | PeftModel
    num_base_parameters: int
    packed: PackedSize
    degrees: Degrees = field(default_factory=Degrees)


def describe_run(config: RunConfig, data: RunData, console: Console | None = None) -> None:
    """Print the plan of a run: rows, tokens, packs, steps, trained parameters, and memory part by part.

    Steps are those of all processes that the launcher started; memory is that of the process with the most.

    Args:
        config: the run's configuration.
        data: result of `load_data(config)`.
        console: console to print to; None: standard output.

    Raises:
        ValueError: the adapter method's schedule does not fit the number of steps, or the model cannot be split as
            the configuration requests.
    """
    console = console or Console()
    config = with_trained_tokens(config, data.source)
    degrees = complete_degrees(config.parallel, world_size())
    outline = outline_model(data.source, config, degrees)
    order = None
    if data.train_rows is not None:
        order = build_data_order(config, data.train_rows, degrees.data * degrees.sharding)
        outline.model.plan_steps(order.total_steps)
    console.print(_plan_table(config, data, outline, order))
    if order is not None:
        console.print(_memory_table(config, data, outline, order))


def outline_model(source: ModelSource, config: RunConfig, degrees: Degrees | None = None) -> ModelOutline:
    """Build the model of a run from its shapes, and check that it can be split into `degrees`.

    Raises:
        ValueError: the model's shapes do not allow the split, or a pattern of weight_quantize_algo matches no layer.
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
        return ModelOutline(adapt_model(base, config), num_base_parameters, packed, degrees)


def _plan_table(
    config: RunConfig, data: RunData, outline: ModelOutline, order: DataOrder | StreamOrder | None
) -> Table:
    table, packed = _two_columns("What would run"), outline.packed
    parameters = [(math.prod(p.shape), p.stop_gradient) for p in outline.model.parameters()]
    trained = sum(size for size, is_frozen in parameters if not is_frozen)
    total = sum(size for size, _ in parameters)
    share = f"{trained / total:.3%}" + (" of model and adapter" if config.peft_switch else "")
    table.add_row("model", f"{config.model.model_name_or_path} ({outline.num_base_parameters:,} parameters)")
    experts = describe_experts(outline.model)
    if experts is not None:
        table.add_row("experts", experts)
    table.add_row("trains", f"{config.peft_switch or 'all weights'}: {trained:,} parameters ({share})")
    if experts is not None:
        table.add_row("of which", describe_kinds(outline.model))
    if packed.num_weights:
        table.add_row("quantized", f"{packed.num_weights:,} weights, {packed.bits:.2f} bits each, scales included")
    if isinstance(order, StreamOrder):
        table.add_row("train rows", "a stream (lazy): rows are not counted")
        table.add_row("optimizer steps", f"{order.total_steps:,} (max_steps)")
    elif data.train_rows is not None and order is not None:
        _add_training_rows(table, config, data.train_rows, order)
    if isinstance(data.eval_rows, Mapping):
        table.add_row("eval rows", ", ".join(f"{name} {len(rows):,}" for name, rows in data.eval_rows.items()))
    elif data.eval_rows is not None:
        table.add_row("eval rows", f"{len(data.eval_rows):,}")
    if config.preference is not None:
        table.add_row("loss", f"{config.preference.loss_type}; reference: {_reference(config.preference)}")
    if config.reward is not None:
        table.add_row("loss", "Bradley-Terry, on the scores of pairs")
    table.add_row("device", f"{config.precision.device}, {config.precision.compute_dtype}")
    table.add_row("output_dir", str(config.train.output_dir))
    return table


def _add_training_rows(table: Table, config: RunConfig, rows: Any, order: DataOrder) -> None:
    """Add the counts of a stored dataset."""
    stats, first_epoch = rows.stats, _first_epoch(order)
    table.add_row("train rows", f"{len(rows):,} of {stats.num_read:,} read")
    table.add_row("train tokens", f"{stats.num_tokens:,}, including {stats.num_target_tokens:,} target tokens")
    packs = sum(len(micro_batch) for step_batch in first_epoch for micro_batch in step_batch.micro_batches)
    num_filled = sum(int(rows.lengths[step_batch.row_indices].sum()) for step_batch in first_epoch)
    table.add_row("packs per epoch", _packs(config, num_filled, packs))
    table.add_row("steps per epoch", f"{len(first_epoch):,}")
    epochs = f"{order.total_steps / len(first_epoch):.2f} epochs"
    table.add_row("optimizer steps", f"{order.total_steps:,} ({epochs})")


def _reference(preference: PreferenceConfig) -> str:
    if not preference.has_reference:
        return "none"
    stored = "" if preference.follows_model else "one pass before training"
    kept = "a copy of trained parameters" if preference.keeps_reference else ""
    return " and ".join(filter(None, (stored, kept)))


def _packs(config: RunConfig, num_filled: int, packs: int) -> str:
    if packing_kind(config.data) == "none":
        return f"{packs:,} (one row each)"
    return f"{packs:,}, {num_filled / (packs * config.data.max_length):.2%} of their positions filled"


def _memory_table(config: RunConfig, data: RunData, outline: ModelOutline, order: DataOrder | StreamOrder) -> Table:
    rows = data.train_rows
    assert rows is not None
    # Of a stream, only the first step is read.
    steps = [next(order.step_batches())] if isinstance(order, StreamOrder) else _first_epoch(order)
    micro_batches = [micro_batch for step_batch in steps for micro_batch in step_batch.micro_batches]
    largest = max(micro_batches, key=lambda packs: _num_positions(config, rows, packs))
    target_tokens = sum(int(rows[index].loss_mask.sum()) for pack in largest for index in pack)
    estimate = estimate_run(config, outline, _num_positions(config, rows, largest), target_tokens)
    title = "Peak memory of a process (estimated)" if outline.degrees != Degrees() else "Peak memory (estimated)"
    table = _two_columns(title)
    for part in fields(estimate):
        table.add_row(part.name, f"{getattr(estimate, part.name) / _GB:.2f} GB")
    table.add_row("total", f"[bold]{estimate.total / _GB:.2f} GB[/bold]")
    return table


def estimate_run(
    config: RunConfig, outline: ModelOutline, micro_batch_tokens: int, target_tokens: int
) -> MemoryEstimate:
    """Estimate the peak memory of a training step, of the process with the most.

    Several processes divide the outline's model, which afterwards has the shapes of one of them.

    Args:
        config: the run's configuration.
        outline: the model's shapes.
        micro_batch_tokens: positions of the largest micro-batch, padding included.
        target_tokens: target tokens of that micro-batch.
    """
    model, num_micro = outline.model, config.train.gradient_accumulation_steps
    num_elements = _num_elements(model)
    work = FlopEstimate(target_tokens / micro_batch_tokens, trains_matrices=config.peft is None)
    shares = process_shares(model, outline.degrees, config.parallel, num_micro, work)
    estimates = []
    for share in shares:
        held = _num_elements(model) / max(1, num_elements)
        packed = PackedSize(round(outline.packed.num_weights * held), round(outline.packed.num_bytes * held))
        estimates.append(_estimate_process(config, model, micro_batch_tokens, target_tokens, packed, share))
    return max(estimates, key=lambda estimate: estimate.total)


def _num_elements(model: CausalLM | PeftModel) -> int:
    """Return the number of elements of the layers' frozen matrices that this process holds, all that is quantized."""
    return sum(
        math.prod(parameter.shape)
        for name, parameter in model.named_parameters()
        if ".layers." in name and parameter.stop_gradient and len(parameter.shape) > 1 and is_materialized(parameter)
    )


def _estimate_process(
    config: RunConfig,
    model: CausalLM | PeftModel,
    micro_batch_tokens: int,
    target_tokens: int,
    packed: PackedSize,
    share: ProcessShare,
) -> MemoryEstimate:
    bytes_per_weight = 4 if weight_dtype(config) == "float32" else 2
    estimate = estimate_memory(
        model,
        micro_batch_tokens=micro_batch_tokens,
        target_tokens=target_tokens,
        recompute=RecomputePlan.from_config(config.train),
        numerics=_numerics(config.precision),
        accumulates=config.train.gradient_accumulation_steps > 1,
        bytes_per_weight=bytes_per_weight,
        optim=config.optim.optim,
        master_weight=config.precision.master_weight,
        float32_gradients=config.precision.float32_gradients,
        packed=packed,
        share=share,
    )
    if config.preference is None or not config.preference.keeps_reference:
        return estimate
    trained = sum(math.prod(parameter.shape) for parameter in trainable_parameters(model).values())
    copied = trained * (bytes_per_weight if config.peft is None else 4)  # adapters are in float32
    return replace(estimate, weights=estimate.weights + copied)


def _numerics(precision: PrecisionConfig) -> Numerics:
    """Return the numerics of the backend for the configured device and number format."""
    is_half = precision.compute_dtype != "float32"
    if precision.device != "cpu":
        on_gpu = GPU if not is_half else GPU_AUTOCAST if precision.fp16_opt_level == "O1" else GPU_HALF
        return replace(on_gpu, triton=_gpu_runs_triton())
    if library.unavailable_reason() is not None:
        return CPU_PADDLE
    return CPU_BF16 if is_half else CPU_NATIVE


def _gpu_runs_triton() -> bool:
    """Return whether ops take Triton kernels on the GPU of this machine, or without one on a Hopper GPU."""
    place = paddle.CUDAPlace(0) if has_gpu() else AbsentGpu()
    return on_gpu_with_triton(cast("Any", SimpleNamespace(place=place))) is None


def _num_positions(config: RunConfig, rows: Any, packs: list[list[int]]) -> int:
    """Return the number of positions of a micro-batch after collation."""
    if config.data.pad_to_max_length:
        return len(packs) * config.data.max_length
    total = sum(rows[index].length for pack in packs for index in pack)
    multiple = config.data.pad_to_multiple_of or 1
    return -(-total // multiple) * multiple


def _first_epoch(order: DataOrder) -> list[StepBatch]:
    step_batches = order.step_batches()
    return [next(step_batches) for _ in range(order.num_steps(0))]


def _two_columns(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, min_width=len(title))
    table.add_column()
    table.add_column()
    return table
