"""Randomness as a function of position: nothing random is saved, and a resumed run draws what the straight one drew."""

from __future__ import annotations

from typing import Any

import paddle

from paddlenlp_ext.utils.random import seed_of


def micro_step_seed(seed: int, step: int, micro_batch: int) -> int:
    """A 32-bit seed, well mixed from where the micro-batch stands in the run."""
    return seed_of(seed, step, micro_batch)


def seed_micro_step(model: Any, seed: int, step: int, micro_batch: int) -> None:
    """Start Paddle's generators anew, now and in each of the model's layers.

    So dropout and noise depend on the position alone, and not on which layers this process runs.
    `micro_batch` counts within the step's window, over all ranks: the numbers are those of one process that goes
    through the window alone.
    """
    draw_seed = micro_step_seed(seed, step, micro_batch)
    paddle.seed(draw_seed)
    model.draw_from(draw_seed)
