"""Shuffle rows, pack them, and group packs of similar cost into optimizer steps.

A packing plan is a pure function of (lengths, settings, seed, epoch), so checkpoints do not store the plan. Example
with row lengths and a capacity of 10:

    rows of an epoch, shuffled    5 4 2 9 1 10
    in_order                      [5 4] [2] [9 1] [10]   next-fit: the first row that does not fit closes the pack
    greedy                        [10] [9 1] [5 4] [2]   rows are chosen from a group of rows to fill each pack

`collate` turns a pack of two rows with 5 and 4 positions into

    position_ids       0 1 2 3 4 | 0 1 2 3
    document_lengths   5         | 4               no attention across the bar

Greedy packing: best-fit decreasing cannot fill space that is smaller than the shortest row. If the shortest row has 60
tokens, a pack may have up to 59 empty positions. Greedy packing therefore adds rows to a pack until one or two unpacked
rows can complete the pack with at most two empty positions. Among hundreds of rows of many lengths, the
needed rows nearly always exist.

The lengths of the unpacked rows are stored as bits of a large integer: bit n is set if a row of length n is unpacked. A
second integer has the bits in reverse order. Finding the longest row that fits, or all pairs with a given sum, takes a
few integer operations, so packing a million rows takes about a second in plain Python. The packs of the last group are
repacked (data/repack.py). docs/benchmarks/data.md compares the fraction of filled positions with an upper bound.

Load balancing: the attention cost of a pack is the sum of the squared lengths of its rows. Equally full packs differ
widely in cost: one row of 2,000 tokens costs twenty times as much as twenty rows of 100. In an optimizer step, all
devices wait for the slowest device, so packs of similar cost are grouped into steps. For a given global batch size, the
rows of a step do not depend on the number of devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from paddlenlp_ext.data.repack import CLOSE_WASTE, repack
from paddlenlp_ext.data.shared_prefixes import SharedPrefixes, bundle_rows

Pack = list[int]
"""Indices of the rows of a pack."""
PACKINGS = ("none", "in_order", "greedy")
GROUP_ROWS = 4096
"""Number of consecutive rows that greedy packing reorders together."""
CARRIED_ROWS = 1024
"""Number of unpacked rows that are carried over to the next group, so that many rows are available for every pack."""
CLOSE_WITHIN = 3.0
"""Remaining space, as a multiple of the mean row length, at which greedy packing looks for rows to complete a pack."""
STEPS_PER_BLOCK = 16
"""Number of optimizer steps whose packs are sorted together by cost."""


class PackingPlan:
    """Plan of the packs and micro-batches of every epoch.

    Args:
        lengths: int [rows], number of positions of every row (`TokenizedDataset.lengths`).
        batch_size: number of packs in a micro-batch; the last micro-batch of an epoch may have fewer packs.
        packing: "none" (one row per pack), "in_order" (rows keep their order; the first row that does not fit closes
            the pack) or "greedy" (rows are chosen to fill packs).
        capacity: number of positions of a pack; required unless `packing` is "none".
        seed: seed of the shuffled order, combined with the epoch.
        shuffle: whether to shuffle rows; False: the order of the files, for evaluation.
        order: function that returns the row indices of an epoch in reading order; a row may occur more than once.
            None: every row once, shuffled if `shuffle` is set.
        packs_per_step: number of packs of an optimizer step over all devices; greedy packing gives the packs of a step
            similar costs.
        lead: number of leading packs that complete the step begun in the previous window of a stream.
        prefixes: prefixes that rows share. Rows with the same prefix are packed together, and the prefix has positions
            only once per pack. None: rows do not share positions. Not allowed with `packing` "none".
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        *,
        batch_size: int,
        packing: str = "none",
        capacity: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        order: Callable[[int], np.ndarray] | None = None,
        packs_per_step: int = 1,
        lead: int = 0,
        prefixes: SharedPrefixes | None = None,
    ) -> None:
        assert packing in PACKINGS, repr(packing)
        assert batch_size >= 1, f"batch_size is {batch_size}"
        assert packing == "none" or (capacity is not None and capacity >= 1), f"capacity is {capacity}"
        assert packing != "none" or prefixes is None, "shared prefixes require packing"
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.batch_size = batch_size
        self.packing = packing
        self.capacity = capacity
        self.seed = seed
        self.shuffle = shuffle
        self.packs_per_step, self.lead = packs_per_step, lead
        self.prefixes = prefixes
        self._own_order = order
        assert not len(self.lengths) or self.lengths.min() >= 1, "every row must have at least one position"
        if capacity is not None and len(self.lengths):
            longest = int(self.lengths.max())
            assert longest <= capacity, f"row {int(self.lengths.argmax())} takes {longest} positions of {capacity}"

    def epoch(self, epoch: int) -> list[list[Pack]]:
        """Return the micro-batches of an epoch, as lists of packs."""
        packs = self.packs(epoch)
        return [packs[start : start + self.batch_size] for start in range(0, len(packs), self.batch_size)]

    def packs(self, epoch: int) -> list[Pack]:
        """Return the packs of an epoch in reading order."""
        order = self._order(epoch)
        if self.prefixes is None:
            lengths = self.lengths[order]
            return [order[pack].tolist() for pack in self._packed_positions(lengths, np.square(lengths), epoch)]
        assert self.capacity is not None, "packing requires a capacity"
        bundles = bundle_rows(order, self.lengths, self.prefixes, self.capacity, self._pack_items)
        if self.packing == "greedy":
            packs = self._packed_positions(bundles.lengths, bundles.costs, epoch)
        else:
            # A full bundle is a complete pack. The bundles before and after the full bundle may share a pack.
            rest = np.flatnonzero(~bundles.is_full)
            packs = [rest[pack].tolist() for pack in self._pack_items(bundles.lengths[rest], self.capacity)]
            packs = sorted(packs + [[bundle] for bundle in np.flatnonzero(bundles.is_full).tolist()])
        return [bundles.rows_of(pack) for pack in packs]

    def num_positions(self, packs: Sequence[Pack]) -> int:
        """Return the number of positions of some packs, without padding."""
        total = int(self._lengths_in(packs).sum())
        return total if self.prefixes is None else total - int(self.prefixes.repeated(packs).sum())

    def cost(self, packs: Sequence[Pack]) -> int:
        """Return the attention cost of some packs; the cost of attention within a shared prefix counts once."""
        total = attention_cost(self._lengths_in(packs))
        return total if self.prefixes is None else total - attention_cost(self.prefixes.repeated(packs))

    def _lengths_in(self, packs: Sequence[Pack]) -> np.ndarray:
        return self.lengths[list(itertools.chain.from_iterable(packs))]

    def _pack_items(self, lengths: np.ndarray, capacity: int) -> Iterable[Pack]:
        """Pack items of given lengths, in reading order; return the packs as indices into `lengths`."""
        places = np.arange(len(lengths))
        if self.packing == "in_order":
            return pack_in_order(places, lengths, capacity)
        return itertools.chain.from_iterable(pack_greedily(places, lengths, capacity))

    def _packed_positions(self, lengths: np.ndarray, costs: np.ndarray, epoch: int) -> list[Pack]:
        """Return the packs of an epoch as indices into `lengths` and `costs`, which are in reading order."""
        positions = np.arange(len(lengths))
        if self.packing == "none":
            return [[position] for position in positions.tolist()]
        assert self.capacity is not None, "packing requires a capacity"
        if self.packing == "in_order":
            return pack_in_order(positions, lengths, self.capacity)
        shuffled = self._shuffled(epoch, stream=1)
        groups = pack_greedily(positions, lengths, self.capacity)
        packs = [packs[index] for packs in groups for index in shuffled(len(packs)).tolist()]
        leading, packs = packs[: self.lead], packs[self.lead :]
        pack_costs = [int(costs[pack].sum()) for pack in packs]
        even = sort_into_even_steps(pack_costs, self.packs_per_step, self._shuffled(epoch, stream=2))
        return leading + [packs[index] for index in even]

    def fill(self, epoch: int) -> float:
        """Return the fraction of filled positions in packs of `capacity` positions."""
        assert self.capacity is not None, "fill requires a capacity"
        packs = self.packs(epoch)
        return self.num_positions(packs) / (len(packs) * self.capacity) if packs else 0.0

    def _order(self, epoch: int) -> np.ndarray:
        if self._own_order is not None:
            return self._own_order(epoch)
        if not self.shuffle:
            return np.arange(len(self.lengths))
        return self._shuffled(epoch, stream=0)(len(self.lengths))

    def _shuffled(self, epoch: int, stream: int) -> _Permutations:
        return _Permutations(self.seed, epoch, stream, identity=not self.shuffle)


class _Permutations:
    """Generator of seeded permutations that do not depend on the version of NumPy."""

    def __init__(self, seed: int, epoch: int, stream: int, identity: bool) -> None:
        self._bits = np.random.PCG64([seed, epoch, stream])
        self._identity = identity

    def __call__(self, count: int) -> np.ndarray:
        if self._identity:
            return np.arange(count)
        return np.argsort(self._bits.random_raw(count), kind="stable")


def pack_in_order(order: np.ndarray, lengths: np.ndarray, capacity: int) -> list[Pack]:
    """Pack rows by next-fit: rows stay in order, and the first row that does not fit closes a pack."""
    packs: list[Pack] = []
    room = 0
    for row, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if length > room:
            packs.append([])
            room = capacity
        packs[-1].append(row)
        room -= length
    return packs


class _LengthIndex:
    """Index of the unpacked rows by length; rows of equal length are taken in reading order."""

    def __init__(self, rows: list[int], lengths: list[int], capacity: int) -> None:
        self.capacity = capacity
        self.count = len(rows)
        self._by_length: list[Pack] = [[] for _ in range(capacity + 1)]
        self._present = self._mirrored = 0
        for row in reversed(rows):
            self._by_length[lengths[row]].append(row)
        for length in {lengths[row] for row in rows}:
            self._flip(length)

    def take(self, length: int) -> int:
        """Remove and return the next unpacked row of a length."""
        same_length = self._by_length[length]
        row = same_length.pop()
        if not same_length:
            self._flip(length)
        self.count -= 1
        return row

    def has(self, length: int) -> bool:
        return bool(self._present >> length & 1)

    def longest_within(self, room: int) -> int:
        """Return the length of the longest unpacked row that fits into `room` positions; 0: none fits."""
        fitting = self._present & ((1 << (room + 1)) - 1)
        return max(fitting.bit_length() - 1, 0)

    def pair_filling(self, room: int) -> int:
        """Return the length of the longer of two unpacked rows that fill `room` positions exactly; 0: none exist."""
        # After the shift, bit n of the reversed integer is set if a row of length room - n is unpacked.
        pairs = self._present & (self._mirrored >> (self.capacity - room))
        half = room >> 1
        if not room & 1 and pairs >> half & 1 and len(self._by_length[half]) < 2:
            pairs ^= 1 << half
        return max(pairs.bit_length() - 1, 0)

    def _flip(self, length: int) -> None:
        self._present ^= 1 << length
        self._mirrored ^= 1 << (self.capacity - length)


def pack_greedily(order: np.ndarray, lengths: np.ndarray, capacity: int) -> Iterator[list[Pack]]:
    """Pack rows in groups of `GROUP_ROWS`; yield the packs of each group.

    Args:
        order: int [rows], row indices in reading order.
        lengths: number of positions of each row by row index, at most `capacity`.
        capacity: number of positions of a pack.
    """
    length_of = lengths.tolist()
    stream = order.tolist()
    waiting: list[int] = []
    for start in range(0, len(stream), GROUP_ROWS):
        rows = waiting + stream[start : start + GROUP_ROWS]
        is_last = start + GROUP_ROWS >= len(stream)
        packs = _pack_group(rows, length_of, capacity, 0 if is_last else CARRIED_ROWS)
        packed = {row for pack in packs for row in pack}
        waiting = [row for row in rows if row not in packed]
        yield repack(packs, length_of, capacity) if is_last else packs
    assert not waiting


def _pack_group(rows: list[int], lengths: list[int], capacity: int, num_left: int) -> list[Pack]:
    """Pack rows until at most `num_left` rows are unpacked.

    Each pack starts with the first unpacked row in reading order, so packs are as random as the reading order. The last
    `CARRIED_ROWS` rows of a dataset are packed longest first, because short rows are easier to place at the end.
    """
    waiting = _LengthIndex(rows, lengths, capacity)
    close_room = int(CLOSE_WITHIN * sum(lengths[row] for row in rows) / len(rows))
    taken: set[int] = set()
    cursor = 0  # index of the first unpacked row
    packs = []
    while waiting.count > num_left:
        pack: Pack = []
        room = capacity
        while room:
            if room <= close_room and (closing := _closing_rows(waiting, room)):
                pack += closing
                break
            length = 0
            if waiting.count > CARRIED_ROWS:
                while rows[cursor] in taken:
                    cursor += 1
                length = lengths[rows[cursor]]
            if not 0 < length <= room:
                length = waiting.longest_within(room)
            if not length:
                break
            pack.append(waiting.take(length))
            taken.add(pack[-1])
            room -= length
        taken.update(pack)
        packs.append(pack)
    return packs


def _closing_rows(waiting: _LengthIndex, room: int) -> Pack:
    """Take one or two rows that leave at most `CLOSE_WASTE` of `room` positions empty; return [] if there are none."""
    for target in range(room, max(room - CLOSE_WASTE - 1, 0), -1):
        if waiting.has(target):
            return [waiting.take(target)]
        longer = waiting.pair_filling(target)
        if longer:
            return [waiting.take(longer), waiting.take(target - longer)]
    return []


def attention_cost(lengths: Sequence[int] | np.ndarray) -> int:
    """Return the sum of the squared document lengths, to which the cost of attention is proportional."""
    return int(np.square(np.asarray(lengths, dtype=np.int64)).sum())


def sort_into_even_steps(
    costs: Sequence[int], packs_per_step: int, permutation: Callable[[int], np.ndarray]
) -> list[int]:
    """Reorder packs so that the packs of an optimizer step have similar attention costs.

    The packs of each block of `STEPS_PER_BLOCK` steps are sorted by cost and divided into steps, and the steps are
    shuffled. Packs of an incomplete last step stay at the end.

    Args:
        costs: attention cost of each pack, in reading order.
        packs_per_step: number of packs of an optimizer step over all devices.
        permutation: function that returns a random permutation of range(n).

    Returns:
        Indices of the packs in their new order.
    """
    if packs_per_step == 1:
        return list(range(len(costs)))
    in_full_steps = len(costs) - len(costs) % packs_per_step
    ordered: list[int] = []
    for start in range(0, in_full_steps, STEPS_PER_BLOCK * packs_per_step):
        block = np.arange(start, min(start + STEPS_PER_BLOCK * packs_per_step, in_full_steps))
        block = block[np.argsort([costs[index] for index in block.tolist()], kind="stable")]
        steps = block.reshape(-1, packs_per_step)
        ordered += steps[permutation(len(steps))].ravel().tolist()
    return ordered + list(range(in_full_steps, len(costs)))
