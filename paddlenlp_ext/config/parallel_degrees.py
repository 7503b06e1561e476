"""Number of processes along each axis of a run, completed from the configuration and the world size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from paddlenlp_ext.config.sections import ParallelConfig


@dataclass(frozen=True)
class Degrees:
    """Processes along each axis; the product is the world size.

    Attributes:
        data: replicas with their own micro-batches.
        sharding: replicas that also shard optimizer state (and gradients, and weights).
        pipeline: stages, each with some of the layers.
        tensor: shards of every layer.
    """

    data: int = 1
    sharding: int = 1
    pipeline: int = 1
    tensor: int = 1

    def __str__(self) -> str:
        return (
            f"tensor_parallel_degree {self.tensor}, pipeline_parallel_degree {self.pipeline}, "
            f"sharding_parallel_degree {self.sharding}, and {self.data} for data parallelism"
        )


def complete_degrees(options: ParallelConfig, processes: int) -> Degrees:
    """Return all degrees; -1 and 0 switch an axis off, the remaining processes go to sharding, else to data.

    Raises:
        ValueError: the degrees do not divide the processes; names the nearest ones that do.
    """
    tensor, pipeline = max(1, options.tensor_parallel_degree), max(1, options.pipeline_parallel_degree)
    asked_sharding = options.sharding_parallel_degree if options.sharding else 1
    left = processes // (tensor * pipeline)
    sharding = asked_sharding if asked_sharding > 0 else max(1, left)
    product = tensor * pipeline * sharding
    if processes % product:
        asked = Degrees(1, sharding, pipeline, tensor)
        needs = f"{product} or a multiple of it" if processes > product else str(product)
        raise ValueError(
            f"{asked_degrees(asked)} need {needs} processes, and {processes} "
            f"{'was' if processes == 1 else 'were'} started "
            f"(python -m paddle.distributed.launch --nproc_per_node {product} ...); "
            f"nearest with {processes}: {nearest_degrees(asked, processes)}"
        )
    return Degrees(processes // product, sharding, pipeline, tensor)


def asked_degrees(degrees: Degrees) -> str:
    """Return the degrees above 1 in words, by their keys."""
    keys = {
        "tensor_parallel_degree": degrees.tensor,
        "pipeline_parallel_degree": degrees.pipeline,
        "sharding_parallel_degree": degrees.sharding,
    }
    return " times ".join(f"{key} {degree}" for key, degree in keys.items() if degree > 1)


def nearest_degrees(asked: Degrees, processes: int, most_tensor: int | None = None) -> Degrees:
    """Return the combination closest to what was asked, by ratios; on a tie the one with the larger tensor degree.

    Args:
        asked: the degrees that do not fit.
        processes: the world size.
        most_tensor: largest allowed tensor degree, None: any.
    """

    def distance(degrees: Degrees) -> float:
        pairs = ((degrees.tensor, asked.tensor), (degrees.pipeline, asked.pipeline), (degrees.sharding, asked.sharding))
        return sum(abs(math.log(one / other)) for one, other in pairs)

    possible = [one for one in _combinations(processes) if most_tensor is None or one.tensor <= most_tensor]
    return min(possible, key=lambda degrees: (round(distance(degrees), 9), -degrees.tensor))


def _combinations(processes: int) -> Iterator[Degrees]:
    divisors = [number for number in range(1, processes + 1) if processes % number == 0]
    for tensor in divisors:
        for pipeline in divisors:
            for sharding in divisors:
                if processes % (tensor * pipeline * sharding) == 0:
                    yield Degrees(processes // (tensor * pipeline * sharding), sharding, pipeline, tensor)
