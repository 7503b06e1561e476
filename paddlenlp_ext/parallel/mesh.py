"""Device mesh: this process's index, the size and the communication group along every axis.

Eight processes as 2 replicas x 2 pipeline stages x 2 tensor ranks (`pp_first`, outermost axis first):

                  stage 0           stage 1
    replica 0   [ 0 | 1 ]   -->   [ 2 | 3 ]        | tensor ranks: shards of the same layers
    replica 1   [ 4 | 5 ]   -->   [ 6 | 7 ]        --> hidden states; replicas: different micro-batches

The replicas are the product of the data and the sharding axis. Replicas along the sharding axis (ZeRO) also divide
optimizer state, gradients or parameters among themselves. Consecutive replicas may form expert groups, which divide the
experts of every layer among themselves. Paddle's `fleet` creates the groups. With a single process no group is created.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import paddle.distributed as dist

from paddlenlp_ext.config.parallel_degrees import Degrees, complete_degrees
from paddlenlp_ext.paddle_compat import forget_hybrid_groups
from paddlenlp_ext.parallel.gloo import gloo_barrier, install_gloo_collectives
from paddlenlp_ext.sharding_spec import Shard
from paddlenlp_ext.utils.distributed_env import rank, world_size

_ORDER = {  # outermost axis first
    "pp_first": ["dp", "pp", "sharding", "sep", "mp"],
    "sharding_first": ["dp", "sharding", "pp", "sep", "mp"],
}


@dataclass(frozen=True)
class ProcessAxis:
    """Processes that differ from this one along one axis, or along several.

    Attributes:
        index: this process's index along the axis, from 0.
        size: number of processes along the axis.
        group: Paddle's communication group; None with one process.
        ranks: global ranks, in order.
        pairs: for a pipeline, the group of this process and a neighbour in the ring, by the neighbour's index.
            Point-to-point messages need such a group: gloo numbers the messages of a group, and other members would
            lose count.
    """

    index: int = 0
    size: int = 1
    group: Any = None
    ranks: tuple[int, ...] = (0,)
    pairs: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Mesh:
    """All axes of a run.

    Attributes:
        degrees: sizes of the axes.
        data, sharding, pipeline, tensor: one axis each.
        replicas: product of the data and the sharding axis; each replica has its own micro-batches.
        experts: consecutive replicas, each with some of the experts of every layer.
        expert_replicas: the replicas of other expert groups that hold the same experts.
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
        """Create the mesh of `config.parallel` over the processes that the launcher started.

        Raises:
            ValueError: the product of the degrees does not divide the number of processes.
        """
        degrees = complete_degrees(parallel, world_size())
        if world_size() == 1:
            return cls(degrees)
        return _start(degrees, parallel.hybrid_parallel_topo_order)

    @property
    def is_main(self) -> bool:
        """True on the process that logs and writes."""
        return self.world.index == 0

    def holders(self, shard: Shard | None) -> frozenset[int]:
        """Return the global ranks that together hold a tensor of which this process has `shard`, None for all of it."""
        if shard is None or not shard.by_experts:
            return frozenset(self.tensor.ranks)
        # Ranks are linear in the coordinates, so the steps along two axes add up.
        return frozenset(
            replica + tensor - self.world.index for replica in self.experts.ranks for tensor in self.tensor.ranks
        )


@lru_cache
def _start(degrees: Degrees, order: str) -> Mesh:
    """Connect to the other processes; cached so a second call with the same layout reuses the groups."""
    from paddle.distributed import fleet
    from paddle.distributed.fleet.utils.log_util import set_log_level

    set_log_level("WARNING")
    if os.environ.get("PADDLE_DISTRI_BACKEND") == "gloo":
        install_gloo_collectives()
        gloo_barrier()  # one process may have read data for longer than a rendezvous waits
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {
        "dp_degree": degrees.data,
        "mp_degree": degrees.tensor,
        "pp_degree": degrees.pipeline,
        "sharding_degree": degrees.sharding,
        "order": _ORDER[order],
    }
    forget_hybrid_groups()  # a second mesh of the same process needs its own groups
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
    assert rank() in group.ranks, f"process {rank()} is not in its own group {group.ranks}"
    return ProcessAxis(group.ranks.index(rank()), group.nranks, group if group.nranks > 1 else None, tuple(group.ranks))


def _pipeline(groups: Any) -> ProcessAxis:
    """Return the pipeline axis with its pairs; every process creates all pairs, as `new_group` requires."""
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
    """Return the axis over data and sharding; every process creates all groups, as `new_group` requires."""
    if groups.get_sharding_parallel_world_size() == 1:
        return _axis(groups.get_data_parallel_group())
    if groups.get_data_parallel_world_size() == 1:
        return _axis(groups.get_sharding_parallel_group())
    return _new_axis(_replica_ranks(groups))


def _expert_axes(groups: Any, degree: int) -> tuple[ProcessAxis, ProcessAxis]:
    """Return the axis of `degree` consecutive replicas, and that of the replicas at the same place of such groups."""
    if degree == 1:
        return ProcessAxis(), ProcessAxis()
    replicas = _replica_ranks(groups)
    experts = [ranks[start : start + degree] for ranks in replicas for start in range(0, len(ranks), degree)]
    same = [ranks[place::degree] for ranks in replicas for place in range(degree)]
    return _new_axis(experts), _new_axis(same) if len(same[0]) > 1 else ProcessAxis(ranks=(rank(),))


def _replica_ranks(groups: Any) -> list[list[int]]:
    """Return the replicas' ranks for every pipeline stage and tensor rank, data being the outer axis."""
    return sorted(sorted(ranks) for ranks in groups.topology().get_fused_ranks(["data", "sharding"]))


def _new_axis(members: list[list[int]]) -> ProcessAxis:
    """Create a group for each list of ranks and return the axis of this process's own."""
    new_groups = [dist.new_group(ranks) for ranks in members]
    return _axis(next(group for group in new_groups if rank() in group.ranks))
