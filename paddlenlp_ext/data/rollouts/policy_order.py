"""Sequence of the optimizer steps of GRPO: batches that are sampled together, and repeated passes over them.

Example with `steps_per_generation` twice `gradient_accumulation_steps` and `num_iterations` 2:

    sampled batch    0                                  1
    step             0       1       2       3          4       5       ...
    micro-batches    first   second  first   second     first   second
    iteration        0       0       1       1          0       0
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.config.run_config import RunConfig
from paddlenlp_ext.data.data_order import DataOrder
from paddlenlp_ext.data.packing import PackingPlan
from paddlenlp_ext.data.step_batch import StepBatch


@dataclass(frozen=True, kw_only=True)
class PolicyStepBatch(StepBatch):
    """Micro-batches of an optimizer step, and the sampled batch to which they belong.

    Attributes:
        generation: index of the sampled batch in the epoch.
        sampled_rows: dataset indices of the prompts of the sampled batch.
        is_first: whether the step is the first step of the sampled batch.
    """

    generation: int
    sampled_rows: tuple[int, ...]
    is_first: bool


class PolicyOrder(DataOrder):
    """Sequence of the optimizer steps of a run.

    Args:
        plan: plan of the micro-batches of each epoch.
        micro_batches_per_step: `gradient_accumulation_steps` times the number of data-parallel ranks.
        num_parts: number of optimizer steps that a sampled batch is divided into.
        num_iterations: number of passes over a sampled batch.
        num_train_epochs, max_steps: see `DataOrder`.
    """

    def __init__(
        self,
        plan: PackingPlan,
        micro_batches_per_step: int,
        *,
        num_parts: int,
        num_iterations: int,
        num_train_epochs: float = 1.0,
        max_steps: int = -1,
    ) -> None:
        self._num_parts, self._num_iterations = num_parts, num_iterations
        super().__init__(plan, micro_batches_per_step, num_train_epochs=num_train_epochs, max_steps=max_steps)

    def num_steps(self, epoch: int) -> int:
        """Return the number of optimizer steps of an epoch."""
        return super().num_steps(epoch) * self._num_iterations

    def step_batches(
        self, epoch: int = 0, index: int = 0, cursor: Mapping[str, Any] | None = None
    ) -> Iterator[PolicyStepBatch]:
        """Yield the global batches of step `index` of `epoch` and of all later steps, in an endless iterator."""
        assert cursor is None, "a stored dataset must not have a cursor"
        while True:
            for number in range(index, self.num_steps(epoch)):
                yield self._step_batch(epoch, number)
            epoch, index = epoch + 1, 0

    def _step_batch(self, epoch: int, number: int) -> PolicyStepBatch:
        size = self._micro_batches_per_step
        generation, step = divmod(number, self._num_parts * self._num_iterations)
        first = generation * self._num_parts * size
        sampled = self._epoch(epoch)[first : first + self._num_parts * size]
        num_parts = -(-len(sampled) // size)  # the last sampled batch of an epoch may have fewer parts
        start = step % num_parts * size
        members = tuple(sampled[start : start + size])
        num_steps = self.num_steps(epoch)
        return PolicyStepBatch(
            epoch,
            number,
            members,
            tuple(map(self.plan.cost, members)),
            end_fraction=(number + 1) / num_steps,
            is_last=number + 1 == num_steps,
            generation=generation,
            sampled_rows=tuple(row for packs in sampled for pack in packs for row in pack),
            is_first=step == 0,
        )


def build_policy_order(config: RunConfig, lengths: Any, num_ranks: int) -> PolicyOrder:
    """Build the sequence of the optimizer steps of a run with the section `grpo`.

    Args:
        config: the run's configuration.
        lengths: number of positions of each prompt.
        num_ranks: number of data-parallel ranks.

    Raises:
        ValueError: the run has no optimizer steps.
    """
    train, options = config.train, config.grpo
    assert options is not None, "a run of GRPO must have the section grpo"
    plan = PackingPlan(
        lengths, batch_size=train.per_device_train_batch_size // options.num_generations, seed=train.seed, shuffle=True
    )
    steps_per_generation = options.steps_per_generation or train.gradient_accumulation_steps
    return PolicyOrder(
        plan,
        train.gradient_accumulation_steps * num_ranks,
        num_parts=steps_per_generation // train.gradient_accumulation_steps,
        num_iterations=options.num_iterations,
        num_train_epochs=train.num_train_epochs,
        max_steps=train.max_steps,
    )
