"""Where this process stands among those of the run: an index, a size and a communication group along every axis.

Paddle's own `fleet` makes the groups. One process starts nothing of it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import paddle.distributed as dist

from paddlenlp_ext.config.parallel_degrees import Degrees, complete_degrees
from paddlenlp_ext.paddle_compat import forget_hybrid_groups
from paddlenlp_ext.parallel.gloo import install_gloo_collectives
from paddlenlp_ext.utils.distributed_env import rank, world_size

_ORDER = {  # outermost axis first
    "pp_first": ["dp", "pp", "sharding", "sep", "mp"],
    "sharding_first": ["dp", "sharding", "pp", "sep", "mp"],
}


@dataclass(frozen=True)
class ProcessAxis:
    """The processes that differ from this one along one axis, or along several.

    Attributes:
        index: this process's place among them, from 0.
        size: how many they are.
        group: Paddle's group of them; None where there is one process.
        ranks: their global numbers, in order.
        pairs: along a pipeline, by the neighbour's index in the ring, a group of this process and that neighbour. Two
            that send and receive need one: gloo numbers the messages of a group, and the others would lose count.
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
        replicas: data and sharding together: each has micro-batches of its own.
        world: all processes.
    """

    degrees: Degrees = field(default_factory=Degrees)
    data: ProcessAxis = field(default_factory=ProcessAxis)
    sharding: ProcessAxis = field(default_factory=ProcessAxis)
    pipeline: ProcessAxis = field(default_factory=ProcessAxis)
    tensor: ProcessAxis = field(default_factory=ProcessAxis)
    replicas: ProcessAxis = field(default_factory=ProcessAxis)
    world: ProcessAxis = field(default_factory=ProcessAxis)

    @classmethod
    def from_config(cls, parallel: Any) -> Mesh:
        """The mesh of `config.parallel` over the processes that the launcher started.

        Raises:
            ValueError: the degrees do not divide the processes.
        """
        degrees = complete_degrees(parallel, world_size())
        if world_size() == 1:
            return cls(degrees)
        return _start(degrees, parallel.hybrid_parallel_topo_order)

    @property
    def is_main(self) -> bool:
        """Whether this process logs and writes."""
        return self.world.index == 0


@lru_cache
def _start(degrees: Degrees, order: str) -> Mesh:
    """Join the other processes. A process that comes again with the same layout has its groups already."""
    from paddle.distributed import fleet
    from paddle.distributed.fleet.utils.log_util import set_log_level

    set_log_level("WARNING")
    if os.environ.get("PADDLE_DISTRI_BACKEND") == "gloo":
        install_gloo_collectives()
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {
        "dp_degree": degrees.data,
        "mp_degree": degrees.tensor,
        "pp_degree": degrees.pipeline,
        "sharding_degree": degrees.sharding,
        "order": _ORDER[order],
    }
    forget_hybrid_groups()  # a second mesh in the same process would be the first one again
    fleet.init(is_collective=True, strategy=strategy, log_level="WARNING")
    groups = fleet.get_hybrid_communicate_group()
    return Mesh(
        degrees,
        data=_axis(groups.get_data_parallel_group()),
        sharding=_axis(groups.get_sharding_parallel_group()),
        pipeline=_pipeline(groups),
        tensor=_axis(groups.get_model_parallel_group()),
        replicas=_replicas(groups),
        world=ProcessAxis(rank(), world_size(), dist.get_group(0), tuple(range(world_size()))),
    )


def _axis(group: Any) -> ProcessAxis:
    assert rank() in group.ranks, f"process {rank()} is not of its own group {group.ranks}"
    return ProcessAxis(group.ranks.index(rank()), group.nranks, group if group.nranks > 1 else None, tuple(group.ranks))


def _pipeline(groups: Any) -> ProcessAxis:
    """The axis of stages with its pairs; every process makes all of them, as `new_group` wants."""
    axis = _axis(groups.get_pipe_parallel_group())
    if axis.size <= 2:
        return replace(axis, pairs={1 - axis.index: axis.group} if axis.group else {})
    pairs: dict[int, Any] = {}
    for ring in groups.topology().get_comm_list("pipe"):
        for place, one in enumerate(ring):
            other = ring[(place + 1) % axis.size]
            pair = dist.new_group([one, other])
            if rank() in (one, other):
                pairs[axis.ranks.index(other if rank() == one else one)] = pair
    return replace(axis, pairs=pairs)


def _replicas(groups: Any) -> ProcessAxis:
    """The group over data and sharding; every process makes all of them, as `new_group` wants."""
    if groups.get_sharding_parallel_world_size() == 1:
        return _axis(groups.get_data_parallel_group())
    if groups.get_data_parallel_world_size() == 1:
        return _axis(groups.get_sharding_parallel_group())
    every = sorted(sorted(ranks) for ranks in groups.topology().get_fused_ranks(["data", "sharding"]))
    made = [dist.new_group(ranks) for ranks in every]
    return _axis(next(group for group in made if rank() in group.ranks))
