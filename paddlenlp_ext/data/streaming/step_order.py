"""Shuffle and pack the windows of a stream, and group the packs into optimizer steps.

Each window is shuffled and packed like an epoch of a stored dataset. A step may start in one window and end in the
next. The last step of an epoch may have fewer micro-batches than other steps. Every rank reads the full stream, but
collates only the micro-batches that are assigned to the rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paddlenlp_ext.data.packing import Pack, PackingPlan, attention_cost
from paddlenlp_ext.data.step_batch import StepBatch
from paddlenlp_ext.data.streaming.shuffle_buffer import TokenStream, Window
from paddlenlp_ext.utils.seeds import seed_of


class StreamOrder:
    """Sequence of the optimizer steps of a run over a stream, with the interface of `DataOrder`.

    Args:
        stream: stream of rows.
        micro_batches_per_step: `gradient_accumulation_steps` times the number of data-parallel ranks.
        batch_size: number of packs of a micro-batch.
        packing, capacity, seed: see `PackingPlan`.
        max_steps: number of optimizer steps of the run.

    Attributes:
        total_steps: number of optimizer steps of the run.

    Raises:
        ValueError: `max_steps` is not set.
    """

    def __init__(
        self,
        stream: TokenStream,
        micro_batches_per_step: int,
        *,
        batch_size: int,
        packing: str,
        capacity: int | None,
        seed: int,
        max_steps: int,
    ) -> None:
        if max_steps < 1:
            raise ValueError("lazy: the number of rows of a stream is unknown in advance; set max_steps")
        self.total_steps = max_steps
        self._stream, self._batch_size, self._seed = stream, batch_size, seed
        self._packing, self._capacity = packing, capacity
        self._packs_per_step = batch_size * micro_batches_per_step

    def step_batches(
        self, epoch: int = 0, index: int = 0, cursor: Mapping[str, Any] | None = None
    ) -> Iterator[StepBatch]:
        """Yield the global batch of each optimizer step, in an endless iterator.

        Args:
            epoch: first epoch, if `cursor` is None.
            index: index in the epoch of the first step.
            cursor: `next_cursor` of the previous step; None: the start of `epoch`.
        """
        begin = dict(cursor or {"window": None, "pack": 0, "lead": 0})
        first_pack, lead = begin["pack"], begin["lead"]
        pending: list[Pack] = []
        for window in self._stream.windows(epoch, begin["window"]):
            if not pending:
                self._stream.release_before(window)
            packs = self._packs(window, lead)
            for number in range(first_pack, len(packs)):
                pending.append(packs[number])
                is_last = window.is_last and number + 1 == len(packs)
                if len(pending) < self._packs_per_step and not is_last:
                    continue
                done = (number + 1) / len(packs)
                yield StepBatch(
                    window.epoch,
                    index,
                    *self._micro_batches(pending),
                    end_fraction=1.0 if is_last else window.begin + (window.end - window.begin) * done,
                    is_last=is_last,
                    next_cursor={"window": window.start, "pack": number + 1, "lead": lead},
                )
                index, pending = 0 if is_last else index + 1, []
                self._stream.release_before(window)
            first_pack, lead = 0, -len(pending) % self._packs_per_step

    def _packs(self, window: Window, lead: int) -> list[Pack]:
        """Return the packs of a window; each pack lists the indices of its rows in the epoch.

        The first `lead` packs complete the step that began in the previous window.
        """
        plan = PackingPlan(
            window.arrays.lengths,
            batch_size=self._batch_size,
            packing=self._packing,
            capacity=self._capacity,
            seed=seed_of(self._seed, window.epoch, window.number),
            packs_per_step=self._packs_per_step,
            lead=lead,
        )
        return [[window.first_row + row for row in pack] for pack in plan.packs(0)]

    def _micro_batches(self, packs: list[Pack]) -> tuple[tuple[list[Pack], ...], tuple[int, ...]]:
        """Group packs into micro-batches; return the micro-batches and their attention costs."""
        size = self._batch_size
        members = tuple(packs[start : start + size] for start in range(0, len(packs), size))
        costs = (attention_cost([self._stream[row].length for pack in each for row in pack]) for each in members)
        return members, tuple(costs)
