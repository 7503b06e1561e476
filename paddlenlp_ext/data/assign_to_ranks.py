"""Assign the micro-batches of a global batch to data-parallel ranks, balanced by attention cost."""

from __future__ import annotations

from collections.abc import Sequence


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
