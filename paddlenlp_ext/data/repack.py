"""Repack the last rows of a dataset, which greedy packing cannot place well because few rows are left to choose from.

A local search moves the empty positions of many packs into few packs, until whole packs are saved:

    take six incomplete and six full packs apart -> pack their rows again -> keep the new packs if they are better

Each new pack begins with a long row and is completed with the rows that leave the fewest positions empty: the minimum
bin slack heuristic (Gupta and Ho, 1999), with the subset sums as bits of a large integer. Better means a larger sum of
squared empty positions, as in Fleszar and Hindi (2002). The search is deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PACKS_PER_TRY = 6
"""Number of incomplete packs, and of full packs, whose rows are packed again together."""
MAX_FAILURES = 100
"""Number of consecutive tries without improvement that ends the search."""
CLOSE_WASTE = 2
"""Maximum number of empty positions of a pack that counts as full."""


def repack(packs: Sequence[list[int]], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return packs of the same rows with fewer packs, or with the empty positions in fewer packs.

    Args:
        packs: indices into `lengths`.
        lengths: number of positions of each row.
        capacity: number of positions of a pack.
    """
    bits = np.random.PCG64(0)  # raw numbers do not depend on the version of NumPy
    packs = list(packs)
    empty = [capacity - sum(lengths[row] for row in pack) for pack in packs]
    num_positions = len(packs) * capacity - sum(empty)
    failures = 0
    while failures < MAX_FAILURES and (len(packs) - 1) * capacity >= num_positions:
        is_full = np.asarray(empty) <= CLOSE_WASTE
        chosen = [*_sample(np.flatnonzero(~is_full), bits), *_sample(np.flatnonzero(is_full), bits)]
        new = _pack([row for index in chosen for row in packs[index]], lengths, capacity, bits)
        new_empty = [capacity - sum(lengths[row] for row in pack) for pack in new]
        saved = len(chosen) - len(new)
        gain = sum(n * n for n in new_empty) + saved * capacity**2 - sum(empty[index] ** 2 for index in chosen)
        failures = 0 if gain > 0 else failures + 1
        if gain >= 0:  # equally good packs have other rows to combine in the next try
            for index in sorted(chosen, reverse=True):
                del packs[index], empty[index]
            packs += new
            empty += new_empty
    return packs


def _sample(indices: np.ndarray, bits: np.random.PCG64) -> list[int]:
    """Return at most `PACKS_PER_TRY` random indices."""
    return indices[np.argsort(bits.random_raw(len(indices)), kind="stable")][:PACKS_PER_TRY].tolist()


def _pack(rows: list[int], lengths: Sequence[int], capacity: int, bits: np.random.PCG64) -> list[list[int]]:
    """Pack rows in the order of their randomly changed lengths, each pack as full as the remaining rows allow."""
    factors = 0.8 + 0.4 * (bits.random_raw(len(rows)) / 2.0**64)
    waiting = [rows[place] for place in np.argsort(factors * [lengths[row] for row in rows], kind="stable").tolist()]
    packs = []
    while waiting:
        pack = [waiting.pop()]
        for place in _fill(waiting, lengths, capacity - lengths[pack[0]]):
            pack.append(waiting.pop(place))
        packs.append(pack)
    return packs


def _fill(rows: list[int], lengths: Sequence[int], room: int) -> list[int]:
    """Return the places of the rows that leave the fewest of `room` positions empty, in descending order."""
    fits = (1 << (room + 1)) - 1
    sums = [1]  # bit n of entry k is set if a subset of the first k rows has n positions
    for row in rows:
        sums.append(sums[-1] | (sums[-1] << lengths[row]) & fits)
    rest = sums[-1].bit_length() - 1
    places = []
    for place in reversed(range(len(rows))):
        length = lengths[rows[place]]
        if length <= rest and sums[place] >> (rest - length) & 1:
            places.append(place)
            rest -= length
    return places
