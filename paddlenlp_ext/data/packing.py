"""In which order rows are read, and which of them share a pack.

Everything is a pure function of (lengths, settings, seed, epoch): nothing has to be saved to resume.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paddlenlp_ext.data.even_steps import attention_cost, order_by_cost
from paddlenlp_ext.data.exact_fill import fill_exactly

Pack = list[int]
PACKINGS = ("none", "in_order", "greedy")


class BatchPlan:
    """Rows to packs to micro-batches, epoch by epoch.

    Args:
        lengths: slots of every row (`TokenizedDataset.lengths`), int [n].
        batch_size: packs in a micro-batch; the last one of an epoch may hold fewer.
        packing: "none" (a pack is a row), "in_order" (a pack is closed when the next row does not fit: the stream's
            order is kept exactly) or "greedy" (rows of a group of the stream are chosen so that packs are full).
        capacity: slots of a pack; needed for packing.
        seed: with the epoch's number decides the order.
        shuffle: False keeps the order of the file (evaluation).
        packs_per_step: packs of an optimizer step; greedy packing brings packs of like cost together in each.

    Raises:
        ValueError: an unknown packing, a batch size below one, or packing without a capacity.
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
        packs_per_step: int = 1,
    ) -> None:
        if packing not in PACKINGS:
            raise ValueError(f"packing is {packing!r}; it can be {', '.join(PACKINGS)}")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        if packing != "none" and (capacity is None or capacity < 1):
            raise ValueError(f"packing {packing!r} needs a capacity (max_length), got {capacity}")
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.batch_size = batch_size
        self.packing = packing
        self.capacity = capacity
        self.seed = seed
        self.shuffle = shuffle
        self.packs_per_step = packs_per_step
        assert not len(self.lengths) or self.lengths.min() >= 1, "every row has at least one slot"
        if capacity is not None and len(self.lengths):
            longest = int(self.lengths.max())
            assert longest <= capacity, f"row {int(self.lengths.argmax())} takes {longest} slots of {capacity}"

    def epoch(self, epoch: int) -> list[list[Pack]]:
        """The micro-batches of an epoch; every row is in exactly one pack."""
        packs = self.packs(epoch)
        return [packs[start : start + self.batch_size] for start in range(0, len(packs), self.batch_size)]

    def packs(self, epoch: int) -> list[Pack]:
        """The packs of an epoch, in the order they are read."""
        order = self._order(epoch)
        if self.packing == "none":
            return [[int(row)] for row in order]
        if self.packing == "in_order":
            return pack_in_order(order, self.lengths, self.capacity)
        shuffled = self._shuffled(epoch, stream=1)
        groups = fill_exactly(order, self.lengths, self.capacity)
        packs = [packs[index] for packs in groups for index in shuffled(len(packs)).tolist()]
        costs = [attention_cost(self.lengths[pack]) for pack in packs]
        return [packs[index] for index in order_by_cost(costs, self.packs_per_step, self._shuffled(epoch, stream=2))]

    def fill(self, epoch: int) -> float:
        """The share of slots that hold a token when every pack has `capacity` slots, 0 to 1."""
        assert self.capacity is not None, "fill needs a capacity"
        num_packs = len(self.packs(epoch))
        return float(self.lengths.sum() / (num_packs * self.capacity)) if num_packs else 0.0

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.lengths))
        return self._shuffled(epoch, stream=0)(len(self.lengths))

    def _shuffled(self, epoch: int, stream: int) -> _Permutations:
        return _Permutations(self.seed, epoch, stream, identity=not self.shuffle)


class _Permutations:
    """Successive permutations from one seed. Raw generator bits and a stable sort: the same under every NumPy."""

    def __init__(self, seed: int, epoch: int, stream: int, identity: bool) -> None:
        self._bits = np.random.PCG64([seed, epoch, stream])
        self._identity = identity

    def __call__(self, count: int) -> np.ndarray:
        if self._identity:
            return np.arange(count)
        return np.argsort(self._bits.random_raw(count), kind="stable")


def pack_in_order(order: np.ndarray, lengths: np.ndarray, capacity: int) -> list[Pack]:
    """Next-fit: rows stay in the order given; a pack is closed by the first row that does not fit."""
    packs: list[Pack] = []
    room = 0
    for row, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if length > room:
            packs.append([])
            room = capacity
        packs[-1].append(row)
        room -= length
    return packs
