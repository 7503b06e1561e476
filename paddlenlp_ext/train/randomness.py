"""Randomness as a function of position: nothing random is saved, and a resumed run draws what the straight one drew."""

from __future__ import annotations

import numpy as np
import paddle


def micro_step_seed(seed: int, step: int, micro_batch: int) -> int:
    """A 32-bit seed, well mixed from where the micro-batch stands in the run."""
    return int(np.random.SeedSequence([seed, step, micro_batch]).generate_state(1)[0])


def seed_micro_step(seed: int, step: int, micro_batch: int) -> None:
    """Start Paddle's generators anew, so that dropout and noise depend on the position alone.

    `micro_batch` counts within the step's window, over all ranks: the numbers are those of one process that goes
    through the window alone.
    """
    paddle.seed(micro_step_seed(seed, step, micro_batch))
