"""Group the micro-batches of every epoch into optimizer steps.

The rows of each step are a pure function of the configuration and the dataset. A step has
`gradient_accumulation_steps` micro-batches per data-parallel rank. A step does not span two epochs, so the last step of
an epoch may have fewer micro-batches.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np

from paddlenlp_ext.config.run_config import RunConfig
from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.data.dataset import TokenizedDataset
from paddlenlp_ext.data.mixture import MixedDataset
from paddlenlp_ext.data.packing import PackingPlan
from paddlenlp_ext.data.step_batch import StepBatch
from paddlenlp_ext.data.streaming.shuffle_buffer import TokenStream
from paddlenlp_ext.data.streaming.step_order import StreamOrder
from paddlenlp_ext.data.training_rows import TrainingRows
from paddlenlp_ext.utils.logging import get_logger

_OPTIONAL = ("use_pose_convert", "dev_ratio", "share_prefix")
"""Settings that a checkpoint stores only if they are set."""
_ROWS_HASHED = 100_000


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


def packing_kind(data: DataConfig) -> str:
    """Return the packing that `zero_padding` and `greedy_zero_padding` select: "none", "in_order" or "greedy"."""
    if not data.zero_padding:
        return "none"
    return "greedy" if data.greedy_zero_padding else "in_order"


def build_data_order(config: RunConfig, rows: TrainingRows, num_ranks: int = 1) -> DataOrder | StreamOrder:
    """Build the sequence of the optimizer steps of a run over `rows`.

    Raises:
        ValueError: the run has no optimizer steps, `rows` is a stream and `max_steps` is not set, or `share_prefix` is
            set but `rows` were loaded without it.
    """
    train, packing = config.train, packing_kind(config.data)
    micro_batches_per_step = train.gradient_accumulation_steps * num_ranks
    capacity = None if packing == "none" else config.data.max_length
    if isinstance(rows, TokenStream):
        return StreamOrder(
            rows,
            micro_batches_per_step,
            batch_size=train.per_device_train_batch_size,
            packing=packing,
            capacity=capacity,
            seed=train.seed,
            max_steps=train.max_steps,
        )
    prefixes = rows.prefixes if config.data.share_prefix else None
    if config.data.share_prefix and prefixes is None:
        raise ValueError("the train rows were loaded without share_prefix; load them with share_prefix: true")
    plan = PackingPlan(
        rows.lengths,
        batch_size=train.per_device_train_batch_size,
        packing=packing,
        capacity=capacity,
        seed=train.seed,
        shuffle=True,
        order=partial(rows.epoch_rows, seed=train.seed) if isinstance(rows, MixedDataset) else None,
        packs_per_step=train.per_device_train_batch_size * micro_batches_per_step,
        prefixes=prefixes,
    )
    order = DataOrder(
        plan,
        micro_batches_per_step,
        num_train_epochs=train.num_train_epochs,
        max_steps=train.max_steps,
    )
    described = order.describe_prefixes()
    if described is not None:
        get_logger().info("share_prefix: %s in an epoch", described)
    return order


def data_order_settings(config: RunConfig, rows: TrainingRows, num_ranks: int = 1) -> dict[str, Any]:
    """Return the settings and dataset properties that determine the data order, as {name in the checkpoint: value}."""
    return {
        "seed": config.train.seed,
        "per_device_train_batch_size": config.train.per_device_train_batch_size,
        "gradient_accumulation_steps times data ranks": config.train.gradient_accumulation_steps * num_ranks,
        "packing": packing_kind(config.data),
        "max_length": config.data.max_length,
        **_row_settings(rows),
        # Checkpoints of versions without PoSE lack the key.
        **({"use_pose_convert": True} if config.data.use_pose_convert else {}),
        **({"dev_ratio": config.data.dev_ratio} if config.data.dev_ratio else {}),
        **({"share_prefix": True} if config.data.share_prefix else {}),
    }


def check_same_data_order(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Check that a resumed run has the data order of its checkpoint.

    Raises:
        ValueError: a setting that determines the data order is not the same in `saved` and `current`.
    """
    names = [*current, *(name for name in _OPTIONAL if name in saved and name not in current)]
    changed = [
        f"{name} was {saved.get(name)!r}, now {current.get(name)!r}"
        for name in names
        if saved.get(name) != current.get(name)
    ]
    if changed:
        raise ValueError(
            f"the data order of the checkpoint cannot be continued: {'; '.join(changed)}. Restore the old values, set "
            "ignore_data_skip: true to restart the epoch, or train from the start into another output_dir"
        )


def _row_settings(rows: TrainingRows) -> dict[str, Any]:
    if isinstance(rows, TokenStream):
        return rows.order_settings()
    settings = {"number of rows": len(rows), "dataset fingerprint": _fingerprint(rows)}
    return settings | ({"train_dataset_prob": list(rows.weights)} if isinstance(rows, MixedDataset) else {})


def _fingerprint(rows: TokenizedDataset | MixedDataset) -> str:
    """Return a hash of all row lengths, and of the tokens and loss masks of a sample of evenly spaced rows."""
    digest = hashlib.sha256(np.asarray(rows.lengths, dtype=np.int64).tobytes())
    for index in range(0, len(rows), max(1, len(rows) // _ROWS_HASHED)):
        row = rows[index]
        digest.update(np.asarray(row.tokens, dtype=np.int32).tobytes())
        digest.update(np.asarray(row.loss_mask, dtype=bool).tobytes())
    return digest.hexdigest()[:16]
