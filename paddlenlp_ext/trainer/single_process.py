"""Process group of a run in a single process.

`parallel/process_group.py` has the process group of several processes, with the same methods. A replica is a group of
processes that together hold one model: its tensor-parallel ranks and pipeline stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import paddle

from paddlenlp_ext.ops.gradient_clipping import global_norm
from paddlenlp_ext.sharding_spec import Shard

if TYPE_CHECKING:
    from paddlenlp_ext.parallel.process_group import DistributedProcesses

ProcessGroup: TypeAlias = "SingleProcess | DistributedProcesses"
"""Type of the process group of a run."""


class SingleProcess:
    """Process group of one process; no operation communicates.

    Attributes:
        index: index of this process's replica. All processes of a replica have the same index and micro-batches.
        size: number of replicas.
        is_main: whether this process writes files and logs.
        forward_is_collective: whether the forward pass has collectives over all replicas (ZeRO-3, expert parallelism),
            so all replicas must run the same number of forward passes.
    """

    index = 0
    size = 1
    is_main = True
    forward_is_collective = False

    def sum_numbers(self, values: list[float]) -> list[float]:
        """Return `values` unchanged."""
        return values

    def sum_stages(self, values: list[float]) -> list[float]:
        """Return `values` unchanged."""
        return values

    def max_over_processes(self, value: float) -> float:
        """Return `value` unchanged."""
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        """Return a list with the value of this process."""
        return [value]

    def union(self, names: set[str]) -> set[str]:
        """Return `names` unchanged."""
        return names

    def from_main(self, value: Any) -> Any:
        """Return `value` unchanged."""
        return value

    def gather_shards(self, part: paddle.Tensor, shard: Shard) -> paddle.Tensor:
        """Return `part`, which is a full tensor."""
        return part

    def barrier(self) -> None:
        """Do nothing: there is no other process."""

    def after_micro_batch(self) -> None:
        """Do nothing: this process owns all gradients."""

    def reduce_partial_grads(self, parameters: Iterable[paddle.Tensor]) -> None:
        """Do nothing: every gradient is complete."""

    def sum_gradients(self, parameters: Iterable[paddle.Tensor]) -> None:
        """Do nothing: there is one replica."""

    def norm(self, parameters: Iterable[paddle.Tensor]) -> float:
        """Return the global L2 norm of all gradients."""
        return global_norm(parameter.grad for parameter in parameters if parameter.grad is not None)

    def broadcast_updated(self) -> None:
        """Do nothing: this process updates every parameter."""

    def gathered_parameters(self) -> AbstractContextManager[None]:
        """Return an empty context: this process holds all parameters."""
        return nullcontext()

    def save_gathered(self, tensors: Mapping[str, Any], write: Callable[[Mapping[str, Any]], None]) -> None:
        """Call `write` with the tensors."""
        write(tensors)
