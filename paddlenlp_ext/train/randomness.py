"""Randomness as a function of position: nothing random is saved, and a resumed run draws what the straight one drew."""

from __future__ import annotations

import numpy as np
import paddle


def micro_step_seed(seed: int, step: int, micro_step: int, rank: int) -> int:
    """A 32-bit seed, well mixed from where the micro-batch stands in the run."""
    return int(np.random.SeedSequence([seed, step, micro_step, rank]).generate_state(1)[0])


def seed_micro_step(seed: int, step: int, micro_step: int, rank: int = 0) -> None:
    """Start Paddle's generators anew, so that dropout and noise depend on the position alone."""
    paddle.seed(micro_step_seed(seed, step, micro_step, rank))
