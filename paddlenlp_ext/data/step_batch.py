"""Global batch of an optimizer step, and its division among the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.data.packing import Pack

MicroBatch = list[Pack]


@dataclass(frozen=True)
class StepBatch:
    """Micro-batches of one optimizer step over all ranks.

    Attributes:
        epoch: number of the epoch.
        index: index of the step in the epoch.
        micro_batches: the packs of each micro-batch, as row indices.
        costs: attention cost of each micro-batch.
        end_fraction: completed fraction of the epoch after the step.
        is_last: whether the step is the last step of the epoch.
        next_cursor: position in a stream after the step, as JSON values; None for a stored dataset, in which
            (epoch, index) identifies the position.
    """

    epoch: int
    index: int
    micro_batches: tuple[MicroBatch, ...]
    costs: tuple[int, ...]
    end_fraction: float
    is_last: bool
    next_cursor: dict[str, Any] | None = None

    def local_micro_batches(self, rank: int, num_ranks: int) -> dict[int, MicroBatch]:
        """Return {index in the step: micro-batch} for a rank; attention costs are balanced over ranks."""
        return {index: self.micro_batches[index] for index in assign_balanced(self.costs, num_ranks)[rank]}

    @property
    def row_indices(self) -> list[int]:
        """Dataset indices of the rows of the step, in order."""
        return [row for micro_batch in self.micro_batches for pack in micro_batch for row in pack]


def assign_balanced(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Assign the micro-batches of a step to ranks, in descending order of cost, each to the least loaded rank.

    The method is "longest processing time first" (Graham 1969), with the constraint that the micro-batch counts of two
    ranks differ by at most one.

    Args:
        costs: attention cost of each micro-batch.
        num_ranks: number of ranks.

    Returns:
        For each rank, the sorted indices of its micro-batches.
    """
    assignments: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = [0] * num_ranks
    least, num_longer = divmod(len(costs), num_ranks)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        longer_taken = sum(len(assigned) > least for assigned in assignments)
        allowed = least + (longer_taken < num_longer)
        free = [rank for rank in range(num_ranks) if len(assignments[rank]) < allowed]
        rank = min(free, key=lambda rank: (sums[rank], rank))
        assignments[rank].append(index)
        sums[rank] += costs[index]
    return [sorted(assigned) for assigned in assignments]
