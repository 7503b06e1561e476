"""Collective operations of the trainer over the device mesh; trainer/single_process.py has the same operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddlenlp_ext.ops.gradient_clipping import sum_of_squares
from paddlenlp_ext.parallel.collectives import sum_gradients
from paddlenlp_ext.parallel.expert_parallel import ExpertShards
from paddlenlp_ext.parallel.gather_weights import gather_shards, save_gathered
from paddlenlp_ext.parallel.gloo import gloo_barrier
from paddlenlp_ext.parallel.mesh import Mesh
from paddlenlp_ext.parallel.pipeline.stages import is_counted_here, sum_shared_gradients
from paddlenlp_ext.parallel.zero import Sharding
from paddlenlp_ext.sharding_spec import Shard, is_expert_parallel, placement_of


class DistributedProcesses:
    """Processes of a mesh, with the attributes and methods of `trainer.single_process.SingleProcess`.

    Micro-batches are distributed over the replicas (data x sharding). The tensor and pipeline ranks of a replica
    process the same micro-batch.

    Args:
        mesh: device mesh of the run.
        sharding: ZeRO over the sharding axis, or None.
        experts: expert parallelism over the replicas, or None.
    """

    def __init__(self, mesh: Mesh, sharding: Sharding | None = None, experts: ExpertShards | None = None) -> None:
        self.mesh, self.sharding, self.experts = mesh, sharding, experts
        self.forward_is_collective = experts is not None or (sharding is not None and sharding.forward_is_collective)
        self.index, self.size, self.is_main = mesh.replicas.index, mesh.replicas.size, mesh.is_main

    def sum_numbers(self, values: list[float]) -> list[float]:
        """Return the sum of each value over the replicas, computed in double precision."""
        if self.size == 1:
            return values
        return _sums(values, self.mesh.replicas.group)

    def norm(self, parameters: Iterable[paddle.Tensor]) -> float:
        """Return the L2 norm of all gradients over all processes.

        Under ZeRO, only the owner of a parameter counts its gradient. The sums of squares are added over the following
        ranks, in this order:

        - the sharding ranks; for experts, the expert ranks;
        - the tensor ranks, only for sharded parameters (Paddle's flag `is_distributed`);
        - the pipeline stages.
        """
        parameters, experts = _split_experts(parameters)
        counted = [(p, p.grad) for p in parameters if p.grad is not None and self._counts(p)]
        sharded = sum_of_squares(gradient for p, gradient in counted if p.is_distributed)
        full = sum_of_squares(gradient for p, gradient in counted if not p.is_distributed)
        if self.sharding is not None:
            sharded, full = _sums([sharded, full], self.mesh.sharding.group)
        if self.experts is not None:
            of_experts = sum_of_squares(p.grad for p in experts if p.grad is not None)
            sharded += _sums([of_experts], self.mesh.experts.group)[0]
        if self.mesh.tensor.size > 1:
            sharded = _sums([sharded], self.mesh.tensor.group)[0]
        total = sharded + full
        if self.mesh.pipeline.size > 1:
            total = _sums([total], self.mesh.pipeline.group)[0]
        return math.sqrt(total)

    def _counts(self, parameter: paddle.Tensor) -> bool:
        owns = self.sharding is None or self.sharding.is_owner(parameter)
        return owns and is_counted_here(parameter, self.mesh.pipeline)

    def sum_stages(self, values: list[float]) -> list[float]:
        """Return the sum of each value over the pipeline stages of this replica, computed in double precision."""
        if self.mesh.pipeline.size == 1:
            return values
        return _sums(values, self.mesh.pipeline.group)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the `value` of every replica, in the order of the replicas."""
        gloo_barrier()
        if self.size == 1:
            return [value]
        values: list[Any] = []
        dist.all_gather_object(values, value, group=self.mesh.replicas.group)
        return values

    def max_over_processes(self, value: float) -> float:
        """Return the maximum of `value` over all processes."""
        return float(_gathered([value], self.mesh.world.group).max())

    def union(self, names: set[str]) -> set[str]:
        """Return the union of `names` over all processes."""
        by_process: list[set[str]] = []
        dist.all_gather_object(by_process, names, group=self.mesh.world.group)
        return set().union(*by_process)

    def from_main(self, value: Any) -> Any:
        """Return the `value` of the main process on every process."""
        gloo_barrier()
        values: list[Any] = []
        dist.all_gather_object(values, value if self.is_main else None, group=self.mesh.world.group)
        return values[0]

    def gather_shards(self, part: paddle.Tensor, shard: Shard) -> paddle.Tensor:
        """Return the full tensor, gathered from the shards of all ranks; collective, not differentiable."""
        return gather_shards(self.mesh, part, shard)

    def barrier(self) -> None:
        """Wait for all processes of the run; with gloo, the wait has no timeout."""
        gloo_barrier()
        self.max_over_processes(0.0)

    def sum_gradients(self, parameters: Iterable[paddle.Tensor]) -> None:
        """All-reduce gradients over the replicas in place; a gradient that is None on all replicas stays None.

        The gradient of an expert already includes the tokens of all ranks in the expert group, so gradients of experts
        are summed only across expert groups.
        """
        parameters, experts = _split_experts(parameters)
        if self.sharding is not None:
            self.sharding.sum_gradients(parameters)
        elif self.size > 1:
            sum_gradients(parameters, self.mesh.replicas.group)
        if self.mesh.expert_replicas.size > 1:
            sum_gradients(experts, self.mesh.expert_replicas.group)

    def after_micro_batch(self) -> None:
        """Finish a micro-batch: with ZeRO stage 2 or 3, reduce gradients to the owners of the parameters.

        All replicas must call this method the same number of times.
        """
        if self.sharding is not None:
            self.sharding.after_micro_batch()

    def broadcast_updated(self) -> None:
        """Broadcast updated parameters from their owners to all sharding ranks."""
        if self.sharding is not None:
            self.sharding.broadcast_updated()

    @contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """Return a context in which every replica holds all parameter values, even with ZeRO and expert parallelism."""
        with ExitStack() as stack:
            if self.sharding is not None:
                stack.enter_context(self.sharding.gathered_parameters())
            if self.experts is not None:
                stack.enter_context(self.experts.gathered())
            yield

    def reduce_partial_grads(self, parameters: Iterable[paddle.Tensor]) -> None:
        """Sum, in place, gradients that are partial sums on each process.

        The gradients of parameters with `needs_tp_reduce` are summed over the tensor ranks. The gradients of parameters
        that several pipeline stages hold are summed over these stages.
        """
        partial = [parameter for parameter in parameters if placement_of(parameter).needs_tp_reduce]
        if self.mesh.tensor.size > 1 and partial:
            sum_gradients(partial, self.mesh.tensor.group)
        if self.mesh.pipeline.size > 1:
            sum_shared_gradients(parameters, self.mesh.pipeline)

    def save_gathered(self, tensors: Mapping[str, Any], write: Callable[[Mapping[str, Any]], None]) -> None:
        """Call `write` on the main process with all tensors, gathered from their shards (gather_weights.py).

        All processes call this method with their tensors, and return after the main process has written the files.
        """
        save_gathered(self.mesh, tensors, write)


def _split_experts(parameters: Iterable[paddle.Tensor]) -> tuple[list[paddle.Tensor], list[paddle.Tensor]]:
    """Split the parameters into two lists: parameters that all replicas hold, and experts sharded over the replicas."""
    every = list(parameters)
    return [p for p in every if not is_expert_parallel(p)], [p for p in every if is_expert_parallel(p)]


def _gathered(values: list[float], group: Any) -> np.ndarray:
    """Return the values of all processes of `group` in double precision, one row per process.

    The bits of the values are sent as integers, because the communication libraries of some accelerators do not reduce
    float64.
    """
    rows: list[paddle.Tensor] = []
    dist.all_gather(rows, paddle.to_tensor(np.array(values, np.float64).view(np.int64)), group=group)
    return np.stack([row.numpy() for row in rows]).view(np.float64)


def _sums(values: list[float], group: Any) -> list[float]:
    """Return the sum of each value over the processes of `group`, in double precision."""
    return _gathered(values, group).sum(axis=0).tolist()
