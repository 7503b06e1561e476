"""Dry run: print the rows, steps, trainable parameters and estimated memory of a run, without reading weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.table import Table

from paddlenlp_ext.cli.plan_warnings import memory_warning, plan_warnings, prefix_warning
from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.parallel_degrees import Degrees, complete_degrees
from paddlenlp_ext.config.sections.distillation import DistillationConfig
from paddlenlp_ext.config.sections.preference import PreferenceConfig
from paddlenlp_ext.data.data_order import DataOrder
from paddlenlp_ext.data.rollouts.prompt_dataset import StoredRollouts
from paddlenlp_ext.data.sampler import build_data_order, packing_kind
from paddlenlp_ext.data.step_batch import StepBatch
from paddlenlp_ext.data.streaming.shuffle_buffer import TokenStream
from paddlenlp_ext.data.streaming.step_order import StreamOrder
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.devices import capabilities
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.peft.formats.peft_experts import describe_layers_read_as_experts
from paddlenlp_ext.peft.parameter_count import describe_experts, describe_kinds
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.trainer.added_tokens import with_trained_tokens
from paddlenlp_ext.trainer.build_model import unshareable
from paddlenlp_ext.trainer.distillation.on_policy import MAX_ROWS, prompt_of
from paddlenlp_ext.trainer.load_data import RunData, context_warnings
from paddlenlp_ext.trainer.memory.run_estimate import (
    ModelOutline,
    estimate_decoding_state,
    estimate_run,
    estimate_sampling,
    outline_model,
)
from paddlenlp_ext.utils.distributed_env import world_size
from paddlenlp_ext.utils.free_memory import free_memory

_GB, _MB = 1e9, 1e6


def describe_run(config: RunConfig, data: RunData, console: Console | None = None) -> None:
    """Print the plan of a run: rows, tokens, packs, steps, trainable parameters, and memory by category.

    Rows and steps are counted for the whole run, not for each process. Memory is the peak of the process that needs the
    most memory.

    Args:
        config: the run's configuration.
        data: result of `load_data(config)`.
        console: console to print to; None: standard output.

    Raises:
        ValueError: the adapter method's schedule does not fit the number of steps, or the model cannot be sharded with
            the parallel degrees.
    """
    console = console or Console()
    config = with_trained_tokens(config, data.source)
    degrees = complete_degrees(config.parallel, world_size())
    outline = outline_model(data.source, config, degrees)
    order = None
    if data.train_rows is not None:
        order = build_data_order(config, data.train_rows, degrees.data * degrees.sharding)
        outline.model.hooks.plan_steps(order.total_steps)
    console.print(_plan_table(config, data, outline, order))
    if order is not None:
        console.print(_memory_table(config, data, outline, order))


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
    warnings = [
        *context_warnings(config, data.train_rows, data.max_context),
        _peft_warning(outline.model),
        prefix_warning(config, data.train_rows, outline.model),
    ]
    for warning in [*warnings, *(plan_warnings(config, order.total_steps) if order is not None else [])]:
        if warning is not None:
            table.add_row("warning", warning)
    if isinstance(data.eval_rows, Mapping):
        table.add_row("eval rows", ", ".join(f"{name} {len(rows):,}" for name, rows in data.eval_rows.items()))
    elif data.eval_rows is not None:
        table.add_row("eval rows", f"{len(data.eval_rows):,}")
    if data.test_rows is not None:
        table.add_row("test rows", f"{len(data.test_rows):,}")
    if config.preference is not None:
        table.add_row("loss", f"{config.preference.loss_type}; reference: {_reference(config.preference)}")
    if config.grpo is not None:
        table.add_row("loss", f"{config.grpo.loss_type}; {config.grpo.num_generations} completions of each prompt")
    if config.reward is not None:
        table.add_row("loss", "Bradley-Terry, on the scores of pairs")
    if config.distills:
        assert config.distillation is not None
        table.add_row("loss", f"divergence from the teacher; {_teacher(config.distillation)}")
    in_int8 = "; frozen weights are multiplied in 8 bits" if config.model.int8_training else ""
    table.add_row("device", f"{config.precision.device}, {config.precision.compute_dtype}{in_int8}")
    table.add_row("output_dir", str(config.train.output_dir))
    return table


def _peft_warning(model: CausalLM | PeftModel) -> str | None:
    """Return a warning about adapted layers that Hugging Face PEFT does not load; None if it loads all of them."""
    if not isinstance(model, PeftModel):
        return None
    config = model.peft_config
    fields = {"peft_type": config.peft_type, **config.to_adapter_config(model.base_model)}
    return describe_layers_read_as_experts(fields, model.base_model)


def _add_training_rows(table: Table, config: RunConfig, rows: Any, order: DataOrder) -> None:
    stats, first_epoch = rows.stats, _first_epoch(order)
    table.add_row("train rows", f"{len(rows):,} of {stats.num_read:,} read")
    table.add_row("train tokens", f"{stats.num_tokens:,}, including {stats.num_target_tokens:,} target tokens")
    packs = sum(len(micro_batch) for step_batch in first_epoch for micro_batch in step_batch.micro_batches)
    num_filled = sum(order.plan.num_positions(packs) for step in first_epoch for packs in step.micro_batches)
    table.add_row("packs per epoch", _packs(config, num_filled, packs))
    if (shared := order.describe_prefixes()) is not None:
        table.add_row("shared prefixes", shared)
    table.add_row("steps per epoch", f"{len(first_epoch):,}")
    epochs = f"{order.total_steps / len(first_epoch):.2f} epochs"
    table.add_row("optimizer steps", f"{order.total_steps:,} ({epochs})")


def _reference(preference: PreferenceConfig) -> str:
    if not preference.has_reference:
        return "none"
    stored = "" if preference.follows_model else "one pass before training"
    kept = "a copy of trained parameters" if preference.keeps_reference else ""
    return " and ".join(filter(None, (stored, kept)))


def _teacher(distillation: DistillationConfig) -> str:
    if distillation.samples_answers:
        fraction = f"the student samples the answers of {distillation.distillation_lmbda:.0%} of the micro-batches"
        return f"teacher: {distillation.teacher_model_name_or_path}; {fraction}"
    if distillation.teacher_logps_path is None:
        return f"teacher: {distillation.teacher_model_name_or_path}"
    return f"stored log-probabilities in {distillation.teacher_logps_path}"


def _packs(config: RunConfig, num_filled: int, packs: int) -> str:
    if packing_kind(config.data) == "none":
        return f"{packs:,} (one row each)"
    return f"{packs:,}, {num_filled / (packs * config.data.max_length):.2%} of their positions filled"


def _memory_table(config: RunConfig, data: RunData, outline: ModelOutline, order: DataOrder | StreamOrder) -> Table:
    rows = data.train_rows
    assert rows is not None
    # Only the first step of a stream is read.
    steps = [next(order.step_batches())] if isinstance(order, StreamOrder) else _first_epoch(order)
    micro_batches = [micro_batch for step_batch in steps for micro_batch in step_batch.micro_batches]
    copies = _copies_of_prompts(config, outline)
    largest = max(micro_batches, key=lambda packs: _num_positions(config, rows, packs, copies))
    target_tokens = sum(_num_targets(config, rows[index]) for pack in largest for index in pack)
    target_tokens += _num_sampled(config, largest)
    # before `estimate_run`, which may shard the model
    state, sampling = estimate_decoding_state(config, outline), _sampling_bytes(config, rows, outline)
    num_states = _num_states(config, rows, largest)
    estimate = estimate_run(config, outline, _num_positions(config, rows, largest, copies), target_tokens, num_states)
    title = "Peak memory of a process (estimated)" if outline.degrees != Degrees() else "Peak memory (estimated)"
    table = _two_columns(title)
    for part in fields(estimate):
        if part.name == "states" and not estimate.states:
            continue
        table.add_row(part.name, f"{getattr(estimate, part.name) / _GB:.2f} GB")
    table.add_row("total", f"[bold]{estimate.total / _GB:.2f} GB[/bold]")
    peak = estimate.total
    if sampling:
        while_sampling = estimate.process + estimate.weights + estimate.optimizer + sampling
        table.add_row(
            "while sampling", f"{while_sampling / _GB:.2f} GB, including a key-value cache of {sampling / _GB:.2f} GB"
        )
        peak = max(peak, while_sampling)
    if state:
        table.add_row("state of a row while decoding", f"{state / _MB:.3f} MB")
    free = free_memory() if capabilities(config.precision.device).cpp else None
    if free is not None:
        table.add_row("free now", f"{free / _GB:.2f} GB")
    if (warning := memory_warning(peak * world_size(), free)) is not None:
        table.add_row("warning", warning)
    return table


def _sampling_bytes(config: RunConfig, rows: Any, outline: ModelOutline) -> int:
    """Return the bytes of the key-value cache while a process samples completions; 0 if the run does not sample."""
    train, options = config.train, config.grpo
    if _samples_answers(config):
        longest = config.data.max_length if isinstance(rows, TokenStream) else int(rows.lengths.max())
        num_rows = min(MAX_ROWS, train.per_device_train_batch_size * train.gradient_accumulation_steps)
        return estimate_sampling(config, outline, num_rows, longest + config.max_answer_tokens)
    if options is None or isinstance(rows, StoredRollouts):
        return 0
    num_rows = (options.steps_per_generation or train.gradient_accumulation_steps) * train.per_device_train_batch_size
    if train.do_eval:
        evaluated = train.per_device_eval_batch_size * (options.num_generations_eval or options.num_generations)
        num_rows = max(num_rows, evaluated)
    num_positions = int(rows.lengths.max()) + config.generation.max_completion_length
    return estimate_sampling(config, outline, min(options.sampling_batch_size, num_rows), num_positions)


def _samples_answers(config: RunConfig) -> bool:
    return config.distillation is not None and config.distillation.samples_answers


def _copies_of_prompts(config: RunConfig, outline: ModelOutline) -> int:
    """Return how often a micro-batch computes each prompt: with GRPO, once for each completion unless it is shared."""
    if config.grpo is None or (config.grpo.share_prompt and unshareable(outline.model) is None):
        return 1
    return config.grpo.num_generations


def _num_positions(config: RunConfig, rows: Any, packs: list[list[int]], copies: int) -> int:
    """Return the number of token positions of a micro-batch, including padding."""
    if config.data.pad_to_max_length:
        return len(packs) * config.data.max_length
    total = sum(_row_length(config, rows[index]) for pack in packs for index in pack) * copies
    total += _num_sampled(config, packs)
    if config.data.share_prefix:
        total -= int(rows.prefixes.repeated(packs).sum())
    multiple = config.data.pad_to_multiple_of or 1
    return -(-total // multiple) * multiple


def _row_length(config: RunConfig, row: EncodedRow) -> int:
    """Return the number of positions of a row, with the longest answer that a distillation may sample."""
    if not _samples_answers(config):
        return row.length
    return max(row.length, len(prompt_of(row)) - 1 + config.max_answer_tokens)


def _num_targets(config: RunConfig, row: EncodedRow) -> int:
    """Return the number of target tokens of a row, with the longest answer that a distillation may sample."""
    num_stored = int(row.loss_mask.sum())
    return max(num_stored, config.max_answer_tokens) if _samples_answers(config) else num_stored


def _num_sampled(config: RunConfig, packs: list[list[int]]) -> int:
    """Return the maximum number of sampled tokens of a micro-batch with GRPO, else 0."""
    if config.grpo is None:
        return 0
    return len(packs) * config.grpo.num_generations * config.generation.max_completion_length


def _num_states(config: RunConfig, rows: Any, packs: list[list[int]]) -> int:
    """Return the number of documents of a micro-batch if one of them continues another document, else 0."""
    joined = [[rows[index] for index in pack] for pack in packs]
    if config.data.share_prefix:
        joined = [rows.prefixes.join(pack) for pack in joined]
    documents = [document for pack in joined for row in pack for document in row.documents]
    return len(documents) if any(document.parent is not None for document in documents) else 0


def _first_epoch(order: DataOrder) -> list[StepBatch]:
    step_batches = order.step_batches()
    return [next(step_batches) for _ in range(order.num_steps(0))]


def _two_columns(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, min_width=len(title))
    table.add_column()
    table.add_column()
    return table
