"""Positional skip-wise training (PoSE, Zhu et al. 2023, arXiv:2309.10400).

Each row is split into two chunks, and a random skip is added to the position ids of the second chunk. Short training
rows thus cover the position ids of a longer context. Example with six tokens in a context of 20:

    tokens          a  b  c  d  e  f
    position_ids    0  1  9 10 11 12         boundary 2, skip 7

Tokens, labels and the attention mask do not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddlenlp_ext.config.run_config import RunConfig
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow


@dataclass(frozen=True)
class PositionSkips:
    """Random position ids of rows, as a pure function of seed, epoch and row.

    Attributes:
        context: context length of the model, the exclusive upper bound of position ids.
        seed: seed of the run.
    """

    context: int
    seed: int

    def positions(self, epoch: int, row: int, length: int) -> np.ndarray:
        """Return the position ids of a row, int64 [length], increasing and below `context`.

        The boundary is uniform in 1 ... length - 1, and the skip is uniform in 0 ... context - length. The position ids
        of a row of one token, or of the full context length, are consecutive.

        Args:
            epoch: number of the epoch.
            row: index of the row in the dataset.
            length: number of position ids.
        """
        positions = np.arange(length)
        if length > 1 and length < self.context:
            generator = np.random.default_rng([self.seed, epoch, row])
            boundary, skip = generator.integers(1, length), generator.integers(0, self.context - length + 1)
            positions[boundary:] += skip
        return positions

    def of_row(self, epoch: int, row: EncodedRow) -> np.ndarray:
        """Return the position ids of a row of L tokens, int64 [L - 1]."""
        return self.positions(epoch, row.row_index, row.length)


def position_skips(config: RunConfig, context: int) -> PositionSkips | None:
    """Return the random position ids of the training rows; None if `use_pose_convert` is false.

    Args:
        config: configuration of the run.
        context: context length of the model.

    Raises:
        ValueError: the context is not longer than `max_length`.
    """
    if not config.data.use_pose_convert:
        return None
    if context <= config.data.max_length:
        raise ValueError(
            f"use_pose_convert spreads rows over the model's context of {context} positions, which must be more than "
            f"max_length {config.data.max_length}; extend the context (use_long_sequence_strategies, "
            "rope_scaling_factor), or lower max_length"
        )
    return PositionSkips(context, config.train.seed)
