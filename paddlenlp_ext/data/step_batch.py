"""Global batch of an optimizer step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.data.assign_to_ranks import assign_balanced
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
