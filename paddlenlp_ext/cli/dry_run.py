"""What a run would do, worked out from its configuration, its rows and the model's shape. No weight is read."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import paddle
from rich.console import Console
from rich.table import Table

from paddlenlp_ext.checkpoint.hub import resolve_model
from paddlenlp_ext.checkpoint.model_config import read_model_config
from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.parallel_degrees import Degrees, complete_degrees
from paddlenlp_ext.data.sampler import DataOrder, build_data_order, packing_kind
from paddlenlp_ext.models.auto import stored_quantization
from paddlenlp_ext.models.config import DecoderConfig
from paddlenlp_ext.models.decoder import CausalLM
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.ops.cpu import library
from paddlenlp_ext.parallel.pipeline.stages import plan_stages
from paddlenlp_ext.parallel.tensor_parallel import check_tensor_plan
from paddlenlp_ext.quantization.model import NOTHING_PACKED, PackedSize, packed_size
from paddlenlp_ext.trainer.adapter_hooks import training_hooks
from paddlenlp_ext.trainer.build import RunData, adapt_model, quant_options, weight_dtype
from paddlenlp_ext.trainer.memory.activations import GPU, GPU_AUTOCAST, GPU_HALF, NATIVE, NATIVE_HALF, PLAIN, Ops
from paddlenlp_ext.trainer.memory.estimate import MemoryEstimate, estimate_memory
from paddlenlp_ext.utils.distributed_env import world_size

_GB = 1e9


def describe_run(config: RunConfig, data: RunData, console: Console | None = None) -> None:
    """Print the plan: rows and tokens, packs and steps, what trains, memory part by part.

    Steps are those of as many processes as the launcher started; memory is one process's that has the whole model.

    Args:
        config: the run's configuration.
        data: what `load_data` gave for it.
        console: where to; standard output if absent.

    Raises:
        ValueError: the adapter method's schedule does not fit into the run, or the model can't be cut as it asks.
    """
    console = console or Console()
    degrees = complete_degrees(config.parallel, world_size())
    _check_layout(config, degrees)
    model = build_skeleton(config)
    replicas = degrees.data * degrees.sharding
    order = None if data.train_rows is None else build_data_order(config, data.train_rows, replicas)
    if order is not None:
        training_hooks(model).plan_steps(order.total_steps)
    packed = packed_weights(config)
    console.print(_plan_table(config, data, model, order, packed))
    if order is not None:
        console.print(_memory_table(config, data, model, order, packed))


def _check_layout(config: RunConfig, degrees: Degrees) -> None:
    """Refuse what the run would refuse of the model's shapes."""
    with paddle.LazyGuard():
        model = _base(config)
    quantization = quant_options(config.model) or stored_quantization(config.model.model_name_or_path)
    check_tensor_plan(model, degrees.tensor, quantization)
    if degrees.pipeline > 1:
        plan_stages(model.config, degrees.pipeline, config.parallel.virtual_pp_degree)


def build_skeleton(config: RunConfig) -> Any:
    """The model as it would train, with shapes and no values; a quantized one in plain numbers."""
    with paddle.LazyGuard():
        return adapt_model(_base(config), config)


def packed_weights(config: RunConfig) -> PackedSize:
    """What of the model would be quantized, or is stored so.

    Raises:
        ValueError: a pattern of weight_quantize_algo that fits no layer.
    """
    options = quant_options(config.model) or stored_quantization(config.model.model_name_or_path)
    if options is None:
        return NOTHING_PACKED
    with paddle.LazyGuard():
        return packed_size(_base(config), options)


def _base(config: RunConfig) -> CausalLM:
    name = config.model.model_name_or_path
    return CausalLM(DecoderConfig.from_dict(read_model_config(resolve_model(name)), name_or_path=name))


def _plan_table(config: RunConfig, data: RunData, model: Any, order: DataOrder | None, packed: PackedSize) -> Table:
    table = _two_columns("What would run")
    parameters = [(math.prod(p.shape), p.stop_gradient) for p in model.parameters()]
    trained = sum(size for size, is_frozen in parameters if not is_frozen)
    total = sum(size for size, _ in parameters)
    with paddle.LazyGuard():
        base = sum(math.prod(p.shape) for p in _base(config).parameters())
    share = f"{trained / total:.3%}" + (" of model and adapter" if config.peft_switch else "")
    table.add_row("model", f"{config.model.model_name_or_path} ({base:,} parameters)")
    table.add_row("trains", f"{config.peft_switch or 'all weights'}: {trained:,} parameters ({share})")
    if packed.num_weights:
        table.add_row("quantized", f"{packed.num_weights:,} weights, {packed.bits:.2f} bits each, scales included")
    if data.train_rows is not None and order is not None:
        rows, account = data.train_rows, data.train_rows.account
        table.add_row("train rows", f"{len(rows):,} of {account.num_read:,} read")
        table.add_row("train tokens", f"{account.num_tokens:,}, of them learned {account.num_target_tokens:,}")
        first_epoch = _windows_of_epoch(order)
        packs = sum(len(micro_batch) for window in first_epoch for micro_batch in window.micro_batches)
        table.add_row("packs an epoch", _packs(config, int(rows.lengths.sum()), packs))
        table.add_row("steps an epoch", f"{len(first_epoch):,}")
        epochs = f"{order.total_steps / len(first_epoch):.2f} epochs"
        table.add_row("optimizer steps", f"{order.total_steps:,} ({epochs})")
    if data.dev_rows is not None:
        table.add_row("dev rows", f"{len(data.dev_rows):,}")
    table.add_row("device", f"{config.precision.device}, {config.precision.compute_dtype}")
    table.add_row("output_dir", str(config.train.output_dir))
    return table


def _packs(config: RunConfig, num_slots_filled: int, packs: int) -> str:
    if packing_kind(config.data) == "none":
        return f"{packs:,} (one row each)"
    return f"{packs:,}, {num_slots_filled / (packs * config.data.max_length):.2%} of their slots filled"


def _memory_table(config: RunConfig, data: RunData, model: Any, order: DataOrder, packed: PackedSize) -> Table:
    rows = data.train_rows
    assert rows is not None
    micro_batches = [micro_batch for window in _windows_of_epoch(order) for micro_batch in window.micro_batches]
    largest = max(micro_batches, key=lambda packs: _slots(config, rows, packs))
    learned = sum(int(rows[index].learned.sum()) for pack in largest for index in pack)
    estimate = estimate_run(config, model, packed, _slots(config, rows, largest), learned)
    table = _two_columns("Memory at the fullest moment (estimated)")
    for part in fields(estimate):
        table.add_row(part.name, f"{getattr(estimate, part.name) / _GB:.2f} GB")
    table.add_row("total", f"[bold]{estimate.total / _GB:.2f} GB[/bold]")
    return table


def estimate_run(config: RunConfig, model: Any, packed: PackedSize, slots: int, learned: int) -> MemoryEstimate:
    """The memory of a run's step.

    Args:
        config: the run's configuration.
        model: as `build_skeleton` gives it.
        packed: as `packed_weights` gives it.
        slots: positions of the largest micro-batch, padding included.
        learned: how many tokens of it are learned.
    """
    return estimate_memory(
        model,
        micro_batch_tokens=slots,
        learned_tokens=learned,
        recompute=RecomputePlan.from_config(config.train),
        ops=_ops_of(config.precision),
        accumulates=config.train.gradient_accumulation_steps > 1,
        bytes_per_weight=4 if weight_dtype(config) == "float32" else 2,
        optim=config.optim.optim,
        packed=packed,
    )


def _ops_of(precision: Any) -> Ops:
    """What computes on the device and in the format of `config.precision`."""
    is_half = precision.compute_dtype != "float32"
    if precision.device != "cpu":
        return GPU if not is_half else GPU_AUTOCAST if precision.fp16_opt_level == "O1" else GPU_HALF
    if library.unavailable_reason() is not None:
        return PLAIN
    return NATIVE_HALF if is_half else NATIVE


def _slots(config: RunConfig, rows: Any, packs: list[list[int]]) -> int:
    """Positions of a micro-batch, as collate lays it out."""
    if config.data.pad_to_max_length:
        return len(packs) * config.data.max_length
    total = sum(int(rows.lengths[pack].sum()) for pack in packs)
    multiple = config.data.pad_to_multiple_of or 1
    return -(-total // multiple) * multiple


def _windows_of_epoch(order: DataOrder) -> list[Any]:
    windows = order.windows()
    return [next(windows) for _ in range(order.num_windows(0))]


def _two_columns(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, min_width=len(title))
    table.add_column()
    table.add_column()
    return table
