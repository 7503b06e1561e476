"""The same work for every device: packs of like cost share an optimizer step, and are dealt so that none waits long.

Attention costs a pack the sum of its rows' squared lengths, which differs much between packs that are equally full: one
long row, or twenty short ones. Devices that share a step wait for the one with the most. Nothing here asks how many
there are before the packs are dealt, so that the rows of each step stay the same on one device and on many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

STEPS_PER_BLOCK = 16
"""Steps whose packs are sorted together: the order of the stream is kept beyond that."""


def attention_cost(lengths: Sequence[int] | np.ndarray) -> int:
    """What attention costs documents of these lengths, up to a factor: the sum of their squares."""
    return int(np.square(np.asarray(lengths, dtype=np.int64)).sum())


def sort_into_even_steps(
    costs: Sequence[int], packs_per_step: int, permutation: Callable[[int], np.ndarray]
) -> list[int]:
    """Reorder packs so that each step's cost about the same.

    Blocks of `STEPS_PER_BLOCK` steps are sorted by cost, cut into steps, and the steps shuffled. What fills no whole
    step stays at the end.

    Args:
        costs: of each pack, in the order of the stream.
        packs_per_step: packs of an optimizer step, over all devices.
        permutation: gives a permutation of that many numbers, from the run's seed.

    Returns:
        Indices of the packs in their new order.
    """
    if packs_per_step == 1:
        return list(range(len(costs)))
    whole = len(costs) - len(costs) % packs_per_step
    ordered: list[int] = []
    for start in range(0, whole, STEPS_PER_BLOCK * packs_per_step):
        block = np.arange(start, min(start + STEPS_PER_BLOCK * packs_per_step, whole))
        block = block[np.argsort([costs[index] for index in block], kind="stable")]
        steps = block.reshape(-1, packs_per_step)
        ordered += steps[permutation(len(steps))].ravel().tolist()
    return ordered + list(range(whole, len(costs)))


def deal(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Deal the micro-batches of a step to ranks: the dearest first, each to the rank that has least so far.

    Longest processing time first (Graham 1969), with as many micro-batches for each rank, or one less.

    Returns:
        For each rank the indices of its micro-batches, in their order.
    """
    hands: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = [0] * num_ranks
    least, num_longer = divmod(len(costs), num_ranks)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        longer_taken = sum(len(hand) > least for hand in hands)
        allowed = least + (longer_taken < num_longer)
        free = [rank for rank in range(num_ranks) if len(hands[rank]) < allowed]
        rank = min(free, key=lambda rank: (sums[rank], rank))
        hands[rank].append(index)
        sums[rank] += costs[index]
    return [sorted(hand) for hand in hands]
