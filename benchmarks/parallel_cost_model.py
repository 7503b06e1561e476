"""What a layout costs, from shapes alone: bytes that a process sends in a step, and its memory, part by part.

Collectives are counted as rings (Patarasuk and Yuan 2009): of n bytes among g processes each one sends 2(g-1)/g n in an
all_reduce, (g-1)/g n in an all_gather that gives n, in a reduce_scatter, a broadcast and a reduce of n; n in a send.
Control numbers (token counts, norms, flags) are left out. benchmarks/parallel_cost.py holds this against runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.config.parallel_degrees import Degrees
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.parallel.pipeline.cost_model import FlopEstimate
from paddlenlp_ext.parallel.pipeline.schedule import Pass, entries
from paddlenlp_ext.parallel.pipeline.stages import plan_stages
from paddlenlp_ext.trainer.memory.activations import ActivationModel, Numerics

LOSS_CHUNK = 256
"""Learned positions whose logits stand at one time."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step as one replica sees it.

    Attributes:
        tokens: slots of a micro-batch.
        learned: tokens of a micro-batch that are learned.
        micro_batches: of a replica.
        value_bytes: of a weight, an activation, a gradient: 4 for fp32, 2 for bf16.
        lora_rank: of LoRA on every linear of the layers; 0 trains all weights.
        plan: what is computed again.
    """

    tokens: int
    learned: int
    micro_batches: int = 1
    value_bytes: int = 4
    lora_rank: int = 0
    plan: RecomputePlan | None = None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a run is cut.

    Attributes:
        degrees: processes along each axis.
        stage: of sharding, 0 for none.
        sequence_parallel: whether tensor ranks divide the stream.
        virtual: chunks of layers a process of the pipeline has.
    """

    degrees: Degrees
    stage: int = 0
    sequence_parallel: bool = False
    virtual: int = 1


@dataclass(frozen=True)
class Numbers:
    """Parameters that one process holds: of its layers, of embedding and head, and those that train.

    Attributes:
        partial: trained ones that are whole on every tensor rank, whose gradients these sum.
    """

    layers: int
    ends: int
    trained: int
    partial: int

    @property
    def held(self) -> int:
        """All of them."""
        return self.layers + self.ends


def all_reduce(size: float, ranks: int) -> float:
    """Bytes that a process sends."""
    return 2 * _ring(size, ranks)


def _ring(size: float, ranks: int) -> float:
    return size * (ranks - 1) / ranks


def numbers(config: Any, layout: Layout, step: Step, process: int) -> Numbers:
    """What the pipeline's process number `process` holds, one tensor rank of it."""
    tensor, own = layout.degrees.tensor, len(_own_layers(config, layout, step, process))
    hidden, rank = config.hidden_size, step.lora_rank
    queries, keys = config.head_dim * config.num_attention_heads, config.head_dim * config.num_key_value_heads
    by_outputs = [(hidden, queries), (hidden, keys), (hidden, keys), *[(hidden, config.intermediate_size)] * 2]
    by_inputs = [(queries, hidden), (config.intermediate_size, hidden)]
    matrices = sum(wide * tall for wide, tall in by_outputs + by_inputs) // tensor
    is_first, is_last = process == 0, process == layout.degrees.pipeline - 1
    tables = int(is_first) + int(is_last and not (is_first and config.tie_word_embeddings))
    ends = tables * config.vocab_size * hidden // tensor + (hidden if is_last else 0)
    layers = own * (matrices + 2 * hidden)
    if not rank:
        norms = own * 2 * hidden + (hidden if is_last else 0)
        return Numbers(layers, ends, layers + ends, norms if layout.sequence_parallel else 0)
    whole = rank * own * (sum(wide for wide, _ in by_outputs) + sum(tall for _, tall in by_inputs))
    cut = rank * own * (sum(tall for _, tall in by_outputs) + sum(wide for wide, _ in by_inputs)) // tensor
    return Numbers(layers + whole + cut, ends, whole + cut, whole)


def bytes_sent(config: Any, layout: Layout, step: Step, process: int = 0) -> dict[str, float]:
    """Bytes that a process sends in a step, by the axis it sends along."""
    held = numbers(config, layout, step, process)
    return {
        "tensor": _tensor_bytes(config, layout, step, process, held),
        "pipeline": _pipeline_bytes(config, layout, step, process),
        "replicas": _replica_bytes(layout, step, held),
    }


def _tensor_bytes(config: Any, layout: Layout, step: Step, process: int, held: Numbers) -> float:
    """A layer makes two sums of [tokens, hidden] each way, and those forwards again where it is run again."""
    tensor, micro = layout.degrees.tensor, step.micro_batches
    if tensor == 1:
        return 0.0
    stream = step.tokens * config.hidden_size * step.value_bytes
    is_first, is_last = process == 0, process == layout.degrees.pipeline - 1
    sums = sum(4 + _sums_again(step.plan, layer) for layer in _own_layers(config, layout, step, process))
    total = micro * all_reduce(sums * stream, tensor)
    if is_first:
        total += micro * all_reduce(stream, tensor)  # the embedding's vectors
        if step.lora_rank and step.plan is None:  # nothing below the first layer trains
            total -= micro * all_reduce(stream, tensor)
    if layout.sequence_parallel:  # gradients are gathered in front of the layers, the stream is behind them
        total += micro * (is_first + is_last) * _ring(stream, tensor)
    if is_last:
        hidden = step.learned * config.hidden_size * step.value_bytes
        by_chunk = step.learned * (4 + 8 + 2 * 4)  # largest logits, places of hits, sums of exponentials and labels
        total += micro * all_reduce(hidden + by_chunk, tensor)
    return total + all_reduce(held.partial * step.value_bytes, tensor)


def _sums_again(plan: RecomputePlan | None, layer: int) -> int:
    """Sums behind o_proj and down_proj that are made a second time in a layer that is run again."""
    if plan is None or layer in plan.excluded_layers or plan.granularity == "core_attn":
        return 0
    if plan.granularity == "full_attn":
        return 1
    return sum(not plan.saves(place, layer) for place in ("attention_row_ln", "mlp_row_ln"))


def _pipeline_bytes(config: Any, layout: Layout, step: Step, process: int) -> float:
    """The stream goes on behind every chunk but the last, its gradient goes back before every chunk but the first.

    Where it is divided, a rank sends its part.
    """
    degree = layout.degrees.pipeline
    if degree == 1:
        return 0.0
    stream = step.tokens * config.hidden_size * step.value_bytes
    if layout.sequence_parallel:
        stream /= layout.degrees.tensor
    is_end = process in (0, degree - 1)
    transfers = 2 * layout.virtual - int(is_end)
    total = float(step.micro_batches * transfers * stream)
    if config.tie_word_embeddings and is_end and not step.lora_rank:
        total += config.vocab_size * config.hidden_size * step.value_bytes / layout.degrees.tensor
    return total


def _replica_bytes(layout: Layout, step: Step, held: Numbers) -> float:
    """Gradients of replicas, and what sharding sends around (sharding.py); an adapter's gradients stay with all."""
    data, sharding, size = layout.degrees.data, layout.degrees.sharding, step.value_bytes
    trained, is_adapter = held.trained * size, step.lora_rank > 0
    updated = _ring(trained, sharding)
    if layout.stage <= 1 or (is_adapter and layout.stage == 2):
        return all_reduce(trained, data * sharding) + (updated if layout.stage else 0.0)
    lent = 2 * held.layers + held.ends  # a layer comes forwards and backwards, embedding and head once a pass
    borrowed = step.micro_batches * _ring(lent * size, sharding) if layout.stage == 3 else 0.0
    if is_adapter:
        return all_reduce(trained, data * sharding) + updated + borrowed
    gradients = step.micro_batches * _ring(trained, sharding) + all_reduce(trained / sharding, data)
    return gradients + (borrowed if layout.stage == 3 else updated)


def memory(config: Any, layout: Layout, step: Step, process: int = 0) -> dict[str, float]:
    """Bytes of each part of a process's memory at the fullest moment of a step, buffers between them left out.

    Of sharding, even shares of what stands between passes: whole parameters are not as even where one is larger than a
    share; within a pass stages 2 and 3 have the gradients of a layer or two and of both ends besides, and stage 3 their
    values on loan.
    """
    held, sharding, stage = numbers(config, layout, step, process), layout.degrees.sharding, layout.stage
    is_adapter, size = step.lora_rank > 0, step.value_bytes
    lent = held.held - (held.trained if is_adapter else 0)
    weights = held.held - (lent - lent / sharding if stage == 3 else 0)
    layers = ActivationModel(
        config,
        step.plan,
        Numerics(hidden=size, attention=size, product=size),
        tensor=layout.degrees.tensor,
        sequence_parallel=layout.sequence_parallel,
    )
    logits = 2 * min(LOSS_CHUNK, step.learned) * config.vocab_size / layout.degrees.tensor
    return {
        "weights": weights * size,
        "gradients": held.trained * size / (sharding if stage >= 2 and not is_adapter else 1),
        "optimizer": held.trained * (8 if size == 4 else 12) / (sharding if stage else 1),
        "activations": step.tokens * _activations(config, layout, step, process, layers),
        "loss": 4.0 * logits if process == layout.degrees.pipeline - 1 else 0.0,
    }


def _activations(config: Any, layout: Layout, step: Step, process: int, layers: ActivationModel) -> float:
    """Bytes a token, of all micro-batches that are under way at one time."""
    degree = layout.degrees.pipeline
    if degree == 1:
        return layers.saved(range(config.num_hidden_layers))
    bounds = _bounds(config, layout, step)
    one_way = [layers.saved(range(*bounds[c : c + 2])) - layers.recomputed for c in range(len(bounds) - 1)]
    now = most = 0.0
    for entry in entries(process, degree, degree * layout.virtual, step.micro_batches, True):
        if isinstance(entry, Pass):
            now += -one_way[entry.chunk] if entry.backward else one_way[entry.chunk]
            most = max(most, now)
    return most + layers.recomputed


def _own_layers(config: Any, layout: Layout, step: Step, process: int) -> list[int]:
    degree = layout.degrees.pipeline
    if degree == 1:
        return list(range(config.num_hidden_layers))
    bounds = _bounds(config, layout, step)
    own = range(process, len(bounds) - 1, degree)
    return [layer for chunk in own for layer in range(bounds[chunk], bounds[chunk + 1])]


def _bounds(config: Any, layout: Layout, step: Step) -> tuple[int, ...]:
    """Which layers each chunk has, a micro-batch being one document."""
    work = FlopEstimate(step.learned / step.tokens, step.tokens / 2, step.lora_rank == 0, step.plan)
    return plan_stages(config, layout.degrees.pipeline, layout.virtual, work).bounds
