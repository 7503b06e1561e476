"""Device mesh: rank of this process, number of ranks and communication group along every axis.

Example with 8 processes, 2 replicas x 2 pipeline stages x 2 tensor ranks (axis order `pp_first`):

                  stage 0           stage 1
    replica 0   [ 0 | 1 ]   -->   [ 2 | 3 ]        | tensor ranks: shards of the same layers
    replica 1   [ 4 | 5 ]   -->   [ 6 | 7 ]        --> hidden states; replicas: different micro-batches

The replicas are the product of the data axis and the sharding axis. The ranks along the sharding axis shard the
optimizer state and, depending on the ZeRO stage, also gradients and parameters. With expert parallelism, consecutive
replicas form an expert group, which distributes the experts of every layer over its ranks. Paddle's `fleet` creates the
communication groups. A single process has no groups.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import paddle
import paddle.distributed as dist

from paddlenlp_ext.config.parallel_degrees import Degrees, complete_degrees
from paddlenlp_ext.paddle_compat import forget_hybrid_groups
from paddlenlp_ext.parallel.collectives import all_gather_cat, copy_to_group, reduce_from_group
from paddlenlp_ext.parallel.gloo import gloo_barrier, install_gloo_collectives
from paddlenlp_ext.sharding_spec import Shard
from paddlenlp_ext.utils.distributed_env import rank, world_size

_ORDER = {  # outermost axis first
    "pp_first": ["dp", "pp", "sharding", "sep", "mp"],
    "sharding_first": ["dp", "sharding", "pp", "sep", "mp"],
}


@dataclass(frozen=True)
class ProcessAxis:
    """Processes along one mesh axis, or along several axes, with their collectives (see parallel/collectives.py).

    Attributes:
        index: rank of this process along the axis.
        size: number of processes along the axis.
        group: Paddle's communication group; None with one process.
        ranks: global ranks in order.
        pairs: on the pipeline axis, a two-process group with each neighbor in the ring, by the index of the neighbor.
            Every member of a gloo group numbers the group's operations, so a point-to-point message in a larger group
            would desynchronize the other members.
    """

    index: int = 0
    size: int = 1
    group: Any = None
    ranks: tuple[int, ...] = (0,)
    pairs: dict[int, Any] = field(default_factory=dict)

    def all_reduce(self, x: paddle.Tensor) -> paddle.Tensor:
        """Return the sum of `x` over the processes; the backward pass leaves the gradient unchanged."""
        return reduce_from_group(x, self.group)

    def copy(self, x: paddle.Tensor) -> paddle.Tensor:
        """Return `x`, which must be equal on all processes; the backward pass all-reduces the gradient of `x`."""
        return copy_to_group(x, self.group)

    def all_gather(self, part: paddle.Tensor, axis: int) -> paddle.Tensor:
        """Concatenate the equally shaped shards of all processes along `axis`; not differentiable."""
        return all_gather_cat(part, axis, [part.shape[axis]] * self.size, self.group)


@dataclass(frozen=True)
class Mesh:
    """All mesh axes of a run.

    Attributes:
        degrees: sizes of the axes.
        data, sharding, pipeline, tensor: mesh axes.
        replicas: product of the data axis and the sharding axis; each replica processes different micro-batches.
        experts: the expert group of this process, consecutive replicas over which the experts are sharded.
        expert_replicas: replicas that hold the same experts as this process, one from each expert group.
        world: all processes.
    """

    degrees: Degrees = field(default_factory=Degrees)
    data: ProcessAxis = field(default_factory=ProcessAxis)
    sharding: ProcessAxis = field(default_factory=ProcessAxis)
    pipeline: ProcessAxis = field(default_factory=ProcessAxis)
    tensor: ProcessAxis = field(default_factory=ProcessAxis)
    replicas: ProcessAxis = field(default_factory=ProcessAxis)
    experts: ProcessAxis = field(default_factory=ProcessAxis)
    expert_replicas: ProcessAxis = field(default_factory=ProcessAxis)
    world: ProcessAxis = field(default_factory=ProcessAxis)

    @classmethod
    def from_config(cls, parallel: Any) -> Mesh:
        """Create the mesh of `config.parallel` from all processes that the launcher started.

        Raises:
            ValueError: the product of the degrees does not divide the number of processes.
        """
        degrees = complete_degrees(parallel, world_size())
        if world_size() == 1:
            return cls(degrees)
        return _start(degrees, parallel.hybrid_parallel_topo_order)

    @property
    def is_main(self) -> bool:
        """True on the main process, which writes logs and files."""
        return self.world.index == 0

    def holders(self, shard: Shard | None) -> frozenset[int]:
        """Return the global ranks whose shards together form a full tensor.

        Args:
            shard: shard of the tensor on this rank; None if this rank holds the full tensor.
        """
        if shard is None or not shard.by_experts:
            return frozenset(self.tensor.ranks)
        # Global ranks are linear in the mesh coordinates, so the rank offsets along two axes add up.
        return frozenset(
            replica + tensor - self.world.index for replica in self.experts.ranks for tensor in self.tensor.ranks
        )


@lru_cache
def _start(degrees: Degrees, order: str) -> Mesh:
    """Create the groups of the mesh; cached, so that a second call with the same arguments reuses the groups."""
    from paddle.distributed import fleet
    from paddle.distributed.fleet.utils.log_util import set_log_level

    set_log_level("WARNING")
    if os.environ.get("PADDLE_DISTRI_BACKEND") == "gloo":
        install_gloo_collectives()
        gloo_barrier()  # a process that still reads data may arrive after the rendezvous timeout
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {
        "dp_degree": degrees.data,
        "mp_degree": degrees.tensor,
        "pp_degree": degrees.pipeline,
        "sharding_degree": degrees.sharding,
        "order": _ORDER[order],
    }
    forget_hybrid_groups()  # this process may have created another mesh before
    fleet.init(is_collective=True, strategy=strategy, log_level="WARNING")
    groups = fleet.get_hybrid_communicate_group()
    experts, expert_replicas = _expert_axes(groups, degrees.expert)
    return Mesh(
        degrees,
        data=_axis(groups.get_data_parallel_group()),
        sharding=_axis(groups.get_sharding_parallel_group()),
        pipeline=_pipeline(groups),
        tensor=_axis(groups.get_model_parallel_group()),
        replicas=_replicas(groups),
        experts=experts,
        expert_replicas=expert_replicas,
        world=ProcessAxis(rank(), world_size(), dist.get_group(0), tuple(range(world_size()))),
    )


def _axis(group: Any) -> ProcessAxis:
    assert rank() in group.ranks, f"process {rank()} is not a member of its group {group.ranks}"
    return ProcessAxis(group.ranks.index(rank()), group.nranks, group if group.nranks > 1 else None, tuple(group.ranks))


def _pipeline(groups: Any) -> ProcessAxis:
    """Return the pipeline axis with its two-process groups; every process must call `new_group` for every group."""
    axis = _axis(groups.get_pipe_parallel_group())
    if axis.size <= 2:
        return replace(axis, pairs={1 - axis.index: axis.group} if axis.group else {})
    pairs: dict[int, Any] = {}
    for ring in groups.topology().get_comm_list("pipe"):
        for position, one in enumerate(ring):
            other = ring[(position + 1) % axis.size]
            pair = dist.new_group([one, other])
            if rank() in (one, other):
                pairs[axis.ranks.index(other if rank() == one else one)] = pair
    return replace(axis, pairs=pairs)


def _replicas(groups: Any) -> ProcessAxis:
    """Return the product of the data axis and the sharding axis."""
    if groups.get_sharding_parallel_world_size() == 1:
        return _axis(groups.get_data_parallel_group())
    if groups.get_data_parallel_world_size() == 1:
        return _axis(groups.get_sharding_parallel_group())
    return _new_axis(_replica_ranks(groups))


def _expert_axes(groups: Any, degree: int) -> tuple[ProcessAxis, ProcessAxis]:
    """Return the axis within the expert group of `degree` consecutive replicas, and the axis across expert groups."""
    if degree == 1:
        return ProcessAxis(), ProcessAxis()
    replicas = _replica_ranks(groups)
    experts = [ranks[start : start + degree] for ranks in replicas for start in range(0, len(ranks), degree)]
    same = [ranks[place::degree] for ranks in replicas for place in range(degree)]
    return _new_axis(experts), _new_axis(same) if len(same[0]) > 1 else ProcessAxis(ranks=(rank(),))


def _replica_ranks(groups: Any) -> list[list[int]]:
    """Return, for each pipeline stage and tensor rank, the ranks of all replicas.

    The ranks of a sharding group are adjacent.
    """
    return sorted(sorted(ranks) for ranks in groups.topology().get_fused_ranks(["data", "sharding"]))


def _new_axis(members: list[list[int]]) -> ProcessAxis:
    """Create a group for each list of ranks; return the axis of this process. All processes must make this call."""
    new_groups = [dist.new_group(ranks) for ranks in members]
    return _axis(next(group for group in new_groups if rank() in group.ranks))
