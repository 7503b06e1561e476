"""Part of the model and of a training step that one process of each pipeline stage holds.

    tensor parallelism      shards of every layer; with sequence parallelism, shards of the hidden states too
    expert parallelism      some experts of every layer
    pipeline parallelism    the layers of a stage, for all micro-batches in flight (1F1B)
    sharding (ZeRO)         stage 1: shards of the optimizer state; stage 2: shards of the gradients too;
                            stage 3: shards of the parameters too, and the gathered parameters of a few layers

The shapes are computed by the code that shards the model of a run, without communication between processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.config.parallel_degrees import Degrees
from paddlenlp_ext.config.sections.parallel import ParallelConfig
from paddlenlp_ext.parallel.expert_parallel import ExpertShards
from paddlenlp_ext.parallel.mesh import Mesh, ProcessAxis
from paddlenlp_ext.parallel.pipeline.cost_model import FlopEstimate
from paddlenlp_ext.parallel.pipeline.schedule import Pass, build_schedule
from paddlenlp_ext.parallel.pipeline.stages import StagePlan, assign_stages, plan_stages
from paddlenlp_ext.parallel.sequence_parallel import SequenceShards
from paddlenlp_ext.parallel.tensor_parallel import apply_tensor_plan
from paddlenlp_ext.trainer.shard_model import build_sharding


@dataclass(frozen=True)
class ProcessShare:
    """Part of a training step that one process computes.

    Attributes:
        layers: decoder layers with saved activations at the peak; an index occurs once per micro-batch in flight.
        has_head: whether the process computes the loss.
        tensor: tensor-parallel degree.
        sequence_parallel: whether the hidden states between the sharded layers are sharded along the sequence.
        replicas: number of replicas whose gradients are summed.
        shards_gradients: whether the process holds only its shard of the gradients (ZeRO-2, ZeRO-3).
    """

    layers: tuple[int, ...]
    has_head: bool = True
    tensor: int = 1
    sequence_parallel: bool = False
    replicas: int = 1
    shards_gradients: bool = False


def process_shares(
    model: Any, degrees: Degrees, parallel: ParallelConfig, num_micro: int, work: FlopEstimate | None = None
) -> Iterator[ProcessShare]:
    """Shard a model without values, and yield the share of one process of each pipeline stage.

    While the caller uses a share, the parameters of `model` have the shapes and placement of that process.

    Args:
        model: a `CausalLM` or `PeftModel`.
        degrees: number of processes along each axis of the mesh.
        parallel: the run's `config.parallel`.
        num_micro: micro-batches of a replica in an optimizer step.
        work: estimated FLOPs, used to balance the layers over the pipeline stages; None: the default estimate.

    Raises:
        ValueError: the model's shapes cannot be divided by the degrees.
    """
    decoder = model.get_base_model()
    num_layers, is_adapter = decoder.config.num_hidden_layers, decoder is not model
    plan = None
    if degrees.pipeline > 1:
        plan = plan_stages(decoder.config, degrees.pipeline, parallel.virtual_pp_degree, work)
    tensor, experts, replicas = (_first(size) for size in (degrees.tensor, degrees.expert, degrees.sharding))
    shards_sequence = degrees.tensor > 1 and bool(parallel.sequence_parallel)
    if degrees.tensor > 1:
        apply_tensor_plan(model, tensor, SequenceShards(tensor) if shards_sequence else None)
    if degrees.expert > 1:
        ExpertShards(model, experts)
    for stage in range(degrees.pipeline):
        if plan is not None:
            assign_stages(model, plan, stage)
        sharding = build_sharding(model, Mesh(sharding=replicas), parallel.sharding)
        yield ProcessShare(
            layers=tuple(range(num_layers)) if plan is None else _layers_in_flight(plan, stage, num_micro),
            has_head=stage == degrees.pipeline - 1,
            tensor=degrees.tensor,
            sequence_parallel=shards_sequence,
            replicas=degrees.data * degrees.sharding,
            shards_gradients=sharding is not None and "stage1" not in parallel.sharding and not is_adapter,
        )


def _first(size: int) -> ProcessAxis:
    return ProcessAxis(index=0, size=size, ranks=tuple(range(size)))


def _layers_in_flight(plan: StagePlan, stage: int, num_micro: int) -> tuple[int, ...]:
    """Return the layers with saved activations at the peak of a stage; each occurs once per micro-batch in flight."""
    held: list[Pass] = []
    most: tuple[int, ...] = ()
    for entry in build_schedule(stage, plan.degree, plan.num_chunks, num_micro, training=True):
        if not isinstance(entry, Pass):
            continue
        if entry.backward:
            held = [other for other in held if (other.chunk, other.micro) != (entry.chunk, entry.micro)]
            continue
        held.append(entry)
        layers = tuple(layer for one in held for layer in range(plan.bounds[one.chunk], plan.bounds[one.chunk + 1]))
        most = max(most, layers, key=len)
    return most
