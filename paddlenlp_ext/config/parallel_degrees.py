"""How many processes share each axis of a run: what the configuration leaves open is completed or refused here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from paddlenlp_ext.config.sections import ParallelConfig


@dataclass(frozen=True)
class Degrees:
    """Processes along each axis; their product is the number of processes.

    Attributes:
        data: each has a copy of the weights and its own micro-batches.
        sharding: each has its own micro-batches and a part of the optimizer's state (and gradients, and weights).
        pipeline: each has some of the layers.
        tensor: each has a part of every layer.
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
    """All degrees: -1 and 0 turn an axis off, sharding without a degree takes what is left, else data parallelism does.

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
    """The degrees above 1, by their keys."""
    keys = {
        "tensor_parallel_degree": degrees.tensor,
        "pipeline_parallel_degree": degrees.pipeline,
        "sharding_parallel_degree": degrees.sharding,
    }
    return " times ".join(f"{key} {degree}" for key, degree in keys.items() if degree > 1)


def nearest_degrees(asked: Degrees, processes: int, most_tensor: int | None = None) -> Degrees:
    """The combination least far from what was asked, as ratios count; on a tie the larger tensor degree.

    Args:
        asked: the degrees that can't be had.
        processes: how many there are.
        most_tensor: the largest tensor degree that can be, None: any.
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
