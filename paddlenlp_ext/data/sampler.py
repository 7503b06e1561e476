"""Group the micro-batches of every epoch into optimizer steps.

The rows of each step are a pure function of the configuration and the dataset. A step has
`gradient_accumulation_steps` micro-batches per data-parallel rank. A step does not span two epochs, so the last step of
an epoch may have fewer micro-batches.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import numpy as np

from paddlenlp_ext.config.run_config import RunConfig
from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.data.data_order import DataOrder
from paddlenlp_ext.data.dataset import TokenizedDataset
from paddlenlp_ext.data.mixture import MixedDataset
from paddlenlp_ext.data.packing import PackingPlan
from paddlenlp_ext.data.rollouts.policy_order import build_policy_order
from paddlenlp_ext.data.streaming.shuffle_buffer import TokenStream
from paddlenlp_ext.data.streaming.step_order import StreamOrder
from paddlenlp_ext.data.training_rows import TrainingRows
from paddlenlp_ext.utils.logging import get_logger

_OPTIONAL = ("use_pose_convert", "dev_ratio", "share_prefix")
"""Settings that a checkpoint stores only if they are set."""
_ROWS_HASHED = 100_000


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
    if config.grpo is not None:
        assert not isinstance(rows, TokenStream), "prompts are not streamed"
        return build_policy_order(config, rows.lengths, num_ranks)
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
        # Versions without this key did not repack the last rows, so their packs differ.
        **({"version of greedy packing": 2} if packing_kind(config.data) == "greedy" else {}),
        "max_length": config.data.max_length,
        **_row_settings(rows),
        # Checkpoints of versions without PoSE lack the key.
        **({"use_pose_convert": True} if config.data.use_pose_convert else {}),
        **({"dev_ratio": config.data.dev_ratio} if config.data.dev_ratio else {}),
        **({"share_prefix": True} if config.data.share_prefix else {}),
        **_policy_settings(config, num_ranks),
    }


def _policy_settings(config: RunConfig, num_ranks: int) -> dict[str, Any]:
    options = config.grpo
    if options is None:
        return {}
    steps_per_generation = options.steps_per_generation or config.train.gradient_accumulation_steps
    return {
        "num_generations": options.num_generations,
        "num_iterations": options.num_iterations,
        "steps_per_generation times data ranks": steps_per_generation * num_ranks,
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
