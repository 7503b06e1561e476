"""Cost model of a layout, from shapes only: bytes that a process sends per step, and its memory by part.

Collectives are counted as rings (Patarasuk and Yuan 2009). Bytes that each of g processes sends for n bytes:

    all-reduce                                      2 (g-1)/g n
    all-gather, reduce-scatter, broadcast, reduce   (g-1)/g n
    send                                            n

Control values (token counts, norms, flags) are ignored. benchmarks/parallel_cost.py compares the model with runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.config.parallel_degrees import Degrees
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.parallel.pipeline.cost_model import FlopEstimate
from paddlenlp_ext.parallel.pipeline.schedule import Pass, build_schedule
from paddlenlp_ext.parallel.pipeline.stages import plan_stages
from paddlenlp_ext.trainer.memory.layer_activations import ActivationModel, Numerics

LOSS_CHUNK = 256
"""Target positions whose logits exist at the same time."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step of one replica.

    Attributes:
        tokens: positions of a micro-batch.
        target_tokens: target tokens of a micro-batch.
        micro_batches: micro-batches of the replica.
        value_bytes: bytes of a weight, an activation or a gradient: 4 for fp32, 2 for bf16.
        lora_rank: rank of LoRA on all linear layers; 0 trains all weights.
        plan: recomputed layers and regions; None saves all activations.
    """

    tokens: int
    target_tokens: int
    micro_batches: int = 1
    value_bytes: int = 4
    lora_rank: int = 0
    plan: RecomputePlan | None = None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of a run.

    Attributes:
        degrees: number of processes along each axis.
        stage: ZeRO stage; 0 for none.
        sequence_parallel: whether tensor ranks split the positions.
        virtual: chunks of layers per pipeline process.
    """

    degrees: Degrees
    stage: int = 0
    sequence_parallel: bool = False
    virtual: int = 1


@dataclass(frozen=True)
class Numbers:
    """Parameter counts of one process.

    Attributes:
        layers: parameters of its layers.
        ends: parameters of embedding, last norm and lm_head.
        trained: trainable parameters.
        partial: trainable parameters that every tensor rank holds in full; the ranks sum their gradients.
    """

    layers: int
    ends: int
    trained: int
    partial: int

    @property
    def held(self) -> int:
        """Number of all parameters."""
        return self.layers + self.ends


def all_reduce(size: float, ranks: int) -> float:
    """Return the bytes that a process sends in an all-reduce."""
    return 2 * _ring(size, ranks)


def _ring(size: float, ranks: int) -> float:
    return size * (ranks - 1) / ranks


def numbers(config: Any, layout: Layout, step: Step, process: int) -> Numbers:
    """Return the parameters of one tensor rank of pipeline stage `process`."""
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
    replicated = rank * own * (sum(wide for wide, _ in by_outputs) + sum(tall for _, tall in by_inputs))
    sharded = rank * own * (sum(tall for _, tall in by_outputs) + sum(wide for wide, _ in by_inputs)) // tensor
    return Numbers(layers + replicated + sharded, ends, replicated + sharded, replicated)


def bytes_sent(config: Any, layout: Layout, step: Step, process: int = 0) -> dict[str, float]:
    """Return the bytes that a process sends in a step, by axis."""
    held = numbers(config, layout, step, process)
    return {
        "tensor": _tensor_bytes(config, layout, step, process, held),
        "pipeline": _pipeline_bytes(config, layout, step, process),
        "replicas": _replica_bytes(layout, step, held),
    }


def _tensor_bytes(config: Any, layout: Layout, step: Step, process: int, held: Numbers) -> float:
    """Return the bytes of tensor parallelism: two all-reduces of [tokens, hidden] per layer forward and two backward.

    Recomputed layers repeat the all-reduces of the forward pass.
    """
    tensor, micro = layout.degrees.tensor, step.micro_batches
    if tensor == 1:
        return 0.0
    hidden_bytes = step.tokens * config.hidden_size * step.value_bytes
    is_first, is_last = process == 0, process == layout.degrees.pipeline - 1
    sums = sum(4 + _sums_again(step.plan, layer) for layer in _own_layers(config, layout, step, process))
    total = micro * all_reduce(sums * hidden_bytes, tensor)
    if is_first:
        total += micro * all_reduce(hidden_bytes, tensor)  # sums the embedding's output
        if step.lora_rank and step.plan is None:  # no weights below the first layer are trained
            total -= micro * all_reduce(hidden_bytes, tensor)
    if layout.sequence_parallel:  # gradients are gathered before the layers, hidden states after them
        total += micro * (is_first + is_last) * _ring(hidden_bytes, tensor)
    if is_last:
        hidden = step.target_tokens * config.hidden_size * step.value_bytes
        by_chunk = step.target_tokens * (4 + 8 + 2 * 4)  # maximum logits, argmax, sums of exponentials and label logits
        total += micro * all_reduce(hidden + by_chunk, tensor)
    return total + all_reduce(held.partial * step.value_bytes, tensor)


def _sums_again(plan: RecomputePlan | None, layer: int) -> int:
    """Return the number of all-reduces (after o_proj and down_proj) that a recomputed layer repeats."""
    if plan is None or layer in plan.excluded_layers or plan.granularity == "core_attn":
        return 0
    if plan.granularity == "full_attn":
        return 1
    return sum(not plan.saves(place, layer) for place in ("attention_row_ln", "mlp_row_ln"))


def _pipeline_bytes(config: Any, layout: Layout, step: Step, process: int) -> float:
    """Return the bytes of the pipeline.

    Hidden states are sent after each chunk except the last, gradients before each chunk except the first. With sequence
    parallelism a rank sends its shard.
    """
    degree = layout.degrees.pipeline
    if degree == 1:
        return 0.0
    hidden_bytes = step.tokens * config.hidden_size * step.value_bytes
    if layout.sequence_parallel:
        hidden_bytes /= layout.degrees.tensor
    is_end = process in (0, degree - 1)
    transfers = 2 * layout.virtual - int(is_end)
    total = float(step.micro_batches * transfers * hidden_bytes)
    if config.tie_word_embeddings and is_end and not step.lora_rank:
        total += config.vocab_size * config.hidden_size * step.value_bytes / layout.degrees.tensor
    return total


def _replica_bytes(layout: Layout, step: Step, held: Numbers) -> float:
    """Return the bytes of gradient sums and ZeRO (parallel/zero.py); an adapter's gradients are not sharded."""
    data, sharding, size = layout.degrees.data, layout.degrees.sharding, step.value_bytes
    trained, is_adapter = held.trained * size, step.lora_rank > 0
    updated = _ring(trained, sharding)
    if layout.stage <= 1 or (is_adapter and layout.stage == 2):
        return all_reduce(trained, data * sharding) + (updated if layout.stage else 0.0)
    gathered = 2 * held.layers + held.ends  # layers are gathered forward and backward, the ends once
    gather_bytes = step.micro_batches * _ring(gathered * size, sharding) if layout.stage == 3 else 0.0
    if is_adapter:
        return all_reduce(trained, data * sharding) + updated + gather_bytes
    gradients = step.micro_batches * _ring(trained, sharding) + all_reduce(trained / sharding, data)
    return gradients + (gather_bytes if layout.stage == 3 else updated)


def memory(config: Any, layout: Layout, step: Step, process: int = 0) -> dict[str, float]:
    """Return the bytes of each part of a process's memory at the peak of a step, without fragmentation.

    Sharded state is counted as even shards. In a run, each parameter belongs to one rank, so shards are uneven if a
    parameter is larger than a shard. In the backward pass, stages 2 and 3 also hold the gradients of one or two layers
    and of both ends; stage 3 also holds the gathered values of these layers. The estimate does not count these tensors.
    """
    held, sharding, stage = numbers(config, layout, step, process), layout.degrees.sharding, layout.stage
    is_adapter, size = step.lora_rank > 0, step.value_bytes
    sharded = held.held - (held.trained if is_adapter else 0)
    weights = held.held - (sharded - sharded / sharding if stage == 3 else 0)
    layers = ActivationModel(
        config,
        step.plan,
        Numerics(hidden=size, attention=size, product=size),
        tensor=layout.degrees.tensor,
        sequence_parallel=layout.sequence_parallel,
    )
    logits = 2 * min(LOSS_CHUNK, step.target_tokens) * config.vocab_size / layout.degrees.tensor
    return {
        "weights": weights * size,
        "gradients": held.trained * size / (sharding if stage >= 2 and not is_adapter else 1),
        "optimizer": held.trained * (8 if size == 4 else 12) / (sharding if stage else 1),
        "activations": step.tokens * _activations(config, layout, step, process, layers),
        "loss": 4.0 * logits if process == layout.degrees.pipeline - 1 else 0.0,
    }


def _activations(config: Any, layout: Layout, step: Step, process: int, layers: ActivationModel) -> float:
    """Return the bytes of activations per token, summed over all micro-batches in flight."""
    degree = layout.degrees.pipeline
    if degree == 1:
        return layers.saved(range(config.num_hidden_layers))
    bounds = _bounds(config, layout, step)
    saved_by_chunk = [layers.saved(range(*bounds[c : c + 2])) - layers.recomputed for c in range(len(bounds) - 1)]
    current = peak = 0.0
    for entry in build_schedule(process, degree, degree * layout.virtual, step.micro_batches, True):
        if isinstance(entry, Pass):
            current += -saved_by_chunk[entry.chunk] if entry.backward else saved_by_chunk[entry.chunk]
            peak = max(peak, current)
    return peak + layers.recomputed


def _own_layers(config: Any, layout: Layout, step: Step, process: int) -> list[int]:
    degree = layout.degrees.pipeline
    if degree == 1:
        return list(range(config.num_hidden_layers))
    bounds = _bounds(config, layout, step)
    own = range(process, len(bounds) - 1, degree)
    return [layer for chunk in own for layer in range(bounds[chunk], bounds[chunk + 1])]


def _bounds(config: Any, layout: Layout, step: Step) -> tuple[int, ...]:
    """Return the layers of each chunk, balanced for micro-batches of one document."""
    work = FlopEstimate(step.target_tokens / step.tokens, step.tokens / 2, step.lora_rank == 0, step.plan)
    return plan_stages(config, layout.degrees.pipeline, layout.virtual, work).bounds
