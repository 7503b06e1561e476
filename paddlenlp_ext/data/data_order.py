"""Sequence of the optimizer steps of a run over stored rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from paddlenlp_ext.data.packing import PackingPlan
from paddlenlp_ext.data.step_batch import StepBatch


class DataOrder:
    """Sequence of the optimizer steps of a run over stored rows.

    Args:
        plan: plan of the packs and micro-batches of each epoch.
        micro_batches_per_step: `gradient_accumulation_steps` times the number of data-parallel ranks.
        num_train_epochs: number of epochs; a fraction of an epoch is rounded up to full steps.
        max_steps: number of steps; if positive, it overrides `num_train_epochs`.

    Attributes:
        total_steps: number of optimizer steps of the run.
        plan: plan of the packs.

    Raises:
        ValueError: the dataset is empty, or the run has no optimizer steps.
    """

    def __init__(
        self, plan: PackingPlan, micro_batches_per_step: int, *, num_train_epochs: float = 1.0, max_steps: int = -1
    ) -> None:
        self._micro_batches_per_step = micro_batches_per_step
        self.plan = plan
        self._epoch = lru_cache(maxsize=1)(plan.epoch)
        self._num_steps: dict[int, int] = {}
        if self.num_steps(0) == 0:
            raise ValueError("the train split is empty; add rows to train on")
        self.total_steps = max_steps if max_steps > 0 else self._steps_of_epochs(num_train_epochs)
        if self.total_steps < 1:
            raise ValueError(
                f"num_train_epochs: {num_train_epochs} gives no optimizer step; use a positive number, or set max_steps"
            )

    def num_steps(self, epoch: int) -> int:
        """Return the number of optimizer steps of an epoch."""
        if epoch not in self._num_steps:
            self._num_steps[epoch] = math.ceil(len(self._epoch(epoch)) / self._micro_batches_per_step)
        return self._num_steps[epoch]

    def describe_prefixes(self) -> str | None:
        """Describe the shared prefixes and the positions saved in the first epoch; None without `share_prefix`."""
        if self.plan.prefixes is None:
            return None
        packs = [pack for micro_batch in self._epoch(0) for pack in micro_batch]
        computed, saved = self.plan.num_positions(packs), int(self.plan.prefixes.repeated(packs).sum())
        share = f"{computed:,} of {computed + saved:,} positions are computed ({saved / (computed + saved):.1%} saved)"
        return f"{self.plan.prefixes.describe()}; {share}"

    def _steps_of_epochs(self, num_epochs: float) -> int:
        full_epochs = math.floor(num_epochs)
        steps = sum(self.num_steps(epoch) for epoch in range(full_epochs))
        if num_epochs > full_epochs:
            steps += math.ceil((num_epochs - full_epochs) * self.num_steps(full_epochs) - 1e-9)
        return steps

    def step_batches(
        self, epoch: int = 0, index: int = 0, cursor: Mapping[str, Any] | None = None
    ) -> Iterator[StepBatch]:
        """Yield the global batches of step `index` of `epoch` and of all later steps, in an endless iterator."""
        assert cursor is None, "a stored dataset must not have a cursor"
        while True:
            micro_batches, size = self._epoch(epoch), self._micro_batches_per_step
            for number in range(index, self.num_steps(epoch)):
                end = min((number + 1) * size, len(micro_batches))
                members = tuple(micro_batches[number * size : end])
                yield StepBatch(
                    epoch,
                    number,
                    members,
                    tuple(map(self.plan.cost, members)),
                    end_fraction=end / len(micro_batches),
                    is_last=end == len(micro_batches),
                )
            epoch, index = epoch + 1, 0
