"""Derive the number of processes along each parallel axis from the configuration and the world size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from paddlenlp_ext.config.sections.parallel import ParallelConfig


@dataclass(frozen=True)
class Degrees:
    """Number of processes along each axis; the product of all axes except `expert` is the world size.

    Attributes:
        data: data-parallel replicas.
        sharding: ranks that shard the optimizer state, gradients and weights, depending on the ZeRO stage.
        pipeline: pipeline stages.
        tensor: tensor-parallel ranks.
        expert: number of data and sharding ranks over which the experts of a layer are distributed.
    """

    data: int = 1
    sharding: int = 1
    pipeline: int = 1
    tensor: int = 1
    expert: int = 1

    def __str__(self) -> str:
        return (
            f"tensor_parallel_degree {self.tensor}, pipeline_parallel_degree {self.pipeline}, "
            f"sharding_parallel_degree {self.sharding}, and {self.data} for data parallelism"
        )


def complete_degrees(options: ParallelConfig, processes: int) -> Degrees:
    """Return the degrees of all axes.

    The degrees -1 and 0 turn tensor, pipeline and expert parallelism off. If `sharding` is on, the sharding degrees -1
    and 0 mean all remaining processes. Processes that remain after sharding are data-parallel.

    Raises:
        ValueError: the product of the degrees does not divide `processes`, or the expert degree does not divide the
            number of data and sharding ranks; the message suggests valid degrees.
    """
    tensor, pipeline = max(1, options.tensor_parallel_degree), max(1, options.pipeline_parallel_degree)
    requested_sharding = options.sharding_parallel_degree if options.sharding else 1
    remaining = processes // (tensor * pipeline)
    sharding = requested_sharding if requested_sharding > 0 else max(1, remaining)
    product = tensor * pipeline * sharding
    if processes % product:
        requested = Degrees(1, sharding, pipeline, tensor)
        needed = f"a multiple of {product}" if processes > product else str(product)
        raise ValueError(
            f"{describe_degrees(requested)} need {needed} processes, but {processes} "
            f"{'was' if processes == 1 else 'were'} started "
            f"(python -m paddle.distributed.launch --nproc_per_node {product} ...); "
            f"nearest valid degrees: {nearest_degrees(requested, processes)}"
        )
    replicas, expert = processes // (tensor * pipeline), max(1, options.expert_parallel_degree)
    if replicas % expert:
        works = max(degree for degree in range(1, replicas + 1) if replicas % degree == 0 and degree <= expert)
        raise ValueError(
            f"expert_parallel_degree {expert} does not divide the {replicas} data-parallel and sharding ranks "
            f"({Degrees(processes // product, sharding, pipeline, tensor)}); the next smaller valid degree is "
            f"{works}"
        )
    return Degrees(processes // product, sharding, pipeline, tensor, expert)


def describe_degrees(degrees: Degrees) -> str:
    """Describe the degrees above 1, such as "tensor_parallel_degree 2 times pipeline_parallel_degree 4"."""
    keys = {
        "tensor_parallel_degree": degrees.tensor,
        "pipeline_parallel_degree": degrees.pipeline,
        "sharding_parallel_degree": degrees.sharding,
    }
    return " times ".join(f"{key} {degree}" for key, degree in keys.items() if degree > 1)


def nearest_degrees(requested: Degrees, processes: int, max_tensor: int | None = None) -> Degrees:
    """Return the valid degrees nearest to the requested degrees; a tie selects the larger tensor degree.

    The distance is the sum of the absolute logarithms of the ratios between valid and requested degrees.


    Args:
        requested: degrees of the configuration.
        processes: the world size.
        max_tensor: maximum tensor degree; None: no maximum.
    """

    def distance(degrees: Degrees) -> float:
        return sum(
            abs(math.log(degree / target))
            for degree, target in (
                (degrees.tensor, requested.tensor),
                (degrees.pipeline, requested.pipeline),
                (degrees.sharding, requested.sharding),
            )
        )

    candidates = [one for one in _combinations(processes) if max_tensor is None or one.tensor <= max_tensor]
    return min(candidates, key=lambda degrees: (round(distance(degrees), 9), -degrees.tensor))


def _combinations(processes: int) -> Iterator[Degrees]:
    divisors = [number for number in range(1, processes + 1) if processes % number == 0]
    for tensor in divisors:
        for pipeline in divisors:
            for sharding in divisors:
                if processes % (tensor * pipeline * sharding) == 0:
                    yield Degrees(processes // (tensor * pipeline * sharding), sharding, pipeline, tensor)
