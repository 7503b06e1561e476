"""Sums over the processes that have micro-batches of their own: `trainer/process_group.py`'s protocol for
several processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import paddle
import paddle.distributed as dist

from paddlenlp_ext.ops.gradients import sum_of_squares
from paddlenlp_ext.parallel.collectives import sum_gradients
from paddlenlp_ext.parallel.gather import save_gathered
from paddlenlp_ext.parallel.gloo import gloo_barrier
from paddlenlp_ext.parallel.mesh import Mesh
from paddlenlp_ext.parallel.pipeline.stages import is_counted_here, sum_shared_gradients
from paddlenlp_ext.parallel.zero import Sharding
from paddlenlp_ext.sharding_spec import placement_of


class DistributedProcesses:
    """The replicas of a mesh, of which this process is one.

    Micro-batches are dealt over data and sharding ranks; the tensor and pipeline ranks of a replica work on the same.

    Args:
        mesh: the run's.
        sharding: what the replicas share out among them, if they do.
    """

    def __init__(self, mesh: Mesh, sharding: Sharding | None = None) -> None:
        self.mesh, self.sharding = mesh, sharding
        self.forward_is_collective = sharding is not None and sharding.forward_is_collective
        self.index, self.size, self.is_main = mesh.replicas.index, mesh.replicas.size, mesh.is_main

    def sum_numbers(self, values: list[float]) -> list[float]:
        """Each value summed over the replicas, in double precision."""
        if self.size == 1:
            return values
        return _reduced(values, self.mesh.replicas.group, dist.ReduceOp.SUM)

    def norm(self, parameters: Iterable[paddle.Tensor]) -> float:
        """Euclidean norm of all gradients, each counted once.

        Of those that sharding ranks share out, the owner's counts. Those that are cut over tensor ranks
        (`is_distributed`, Paddle's own mark) are summed over these, and the stages of a pipeline are summed.
        """
        counted = [p for p in parameters if p.grad is not None and self._counts(p)]
        cut = sum_of_squares(p.grad for p in counted if p.is_distributed)
        whole = sum_of_squares(p.grad for p in counted if not p.is_distributed)
        if self.sharding is not None:
            cut, whole = _reduced([cut, whole], self.mesh.sharding.group, dist.ReduceOp.SUM)
        if self.mesh.tensor.size > 1:
            cut = _reduced([cut], self.mesh.tensor.group, dist.ReduceOp.SUM)[0]
        total = cut + whole
        if self.mesh.pipeline.size > 1:
            total = _reduced([total], self.mesh.pipeline.group, dist.ReduceOp.SUM)[0]
        return math.sqrt(total)

    def _counts(self, parameter: paddle.Tensor) -> bool:
        owns = self.sharding is None or self.sharding.is_owner(parameter)
        return owns and is_counted_here(parameter, self.mesh.pipeline)

    def sum_stages(self, values: list[float]) -> list[float]:
        """Each value summed over the stages of this replica's pipeline."""
        if self.mesh.pipeline.size == 1:
            return values
        return _reduced(values, self.mesh.pipeline.group, dist.ReduceOp.SUM)

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all replicas, in their order."""
        gloo_barrier()
        if self.size == 1:
            return [value]
        values: list[Any] = []
        dist.all_gather_object(values, value, group=self.mesh.replicas.group)
        return values

    def max_over_processes(self, value: float) -> float:
        """The largest of all processes' values: what one of them has seen, all know."""
        return _reduced([value], self.mesh.world.group, dist.ReduceOp.MAX)[0]

    def union(self, names: set[str]) -> set[str]:
        """All processes' names together."""
        everyone: list[set[str]] = []
        dist.all_gather_object(everyone, names, group=self.mesh.world.group)
        return set().union(*everyone)

    def barrier(self) -> None:
        """Until every process of the run has come here, however long that takes."""
        gloo_barrier()
        self.max_over_processes(0.0)

    def sum_gradients(self, parameters: Iterable[paddle.Tensor]) -> None:
        """Each parameter's gradient summed over the replicas, in place; one that no rank has stays absent."""
        if self.sharding is not None:
            self.sharding.sum_gradients(list(parameters))
        elif self.size > 1:
            sum_gradients(list(parameters), self.mesh.replicas.group)

    def after_micro_batch(self) -> None:
        """Let gradients go where sharding keeps them."""
        if self.sharding is not None:
            self.sharding.after_micro_batch()

    def broadcast_updated(self) -> None:
        """Let every process have what others updated."""
        if self.sharding is not None:
            self.sharding.broadcast_updated()

    def gathered_parameters(self) -> AbstractContextManager[None]:
        """A block in which this process has all values of its replica."""
        return nullcontext() if self.sharding is None else self.sharding.gathered_parameters()

    def reduce_partial_grads(self, parameters: Iterable[paddle.Tensor]) -> None:
        """Gradients of whole parameters of which each tensor rank has seen a part (`needs_tp_reduce`), summed over
        these; and of those that several stages hold, over their stages.
        """
        partial = [parameter for parameter in parameters if placement_of(parameter).needs_tp_reduce]
        if self.mesh.tensor.size > 1 and partial:
            sum_gradients(partial, self.mesh.tensor.group)
        if self.mesh.pipeline.size > 1:
            sum_shared_gradients(parameters, self.mesh.pipeline)

    def save_gathered(self, tensors: Mapping[str, Any], write: Callable[[Mapping[str, Any]], None]) -> None:
        """Call `write` on the main process with every tensor whole, the others' parts included (whole.py)."""
        save_gathered(self.mesh, tensors, write)


def _reduced(values: list[float], group: object, op: int) -> list[float]:
    tensor = paddle.to_tensor(values, dtype="float64")
    dist.all_reduce(tensor, op=op, group=group)
    return tensor.tolist()
