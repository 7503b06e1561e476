"""Learning rate as a pure function of the optimizer step, so that checkpoints need no scheduler state.

    warm-up                      decay                          floor
    0 -> learning_rate, linear   by lr_scheduler_type (below)   min_learning_rate, from decay_steps on

Step 0 is the first optimizer step. The learning rate of step 0 is 0 if the run has a warm-up, as in PaddleNLP and
Transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from paddlenlp_ext.config.sections.optim import OptimConfig

Schedule = Callable[[int], float]
"""Function from the number of completed optimizer steps to the learning rate of the next step."""

_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "constant": lambda progress: 1.0,
    "constant_with_warmup": lambda progress: 1.0,
}


def num_warmup_steps(options: OptimConfig, total_steps: int) -> int:
    """Return `warmup_steps` if it is above 0, else `warmup_ratio` times `total_steps`, rounded up."""
    if options.warmup_steps > 0:
        return options.warmup_steps
    return math.ceil(options.warmup_ratio * total_steps - 1e-9)


def build_schedule(options: OptimConfig, total_steps: int) -> Schedule:
    """Return the schedule of `lr_scheduler_type` over `total_steps` optimizer steps."""
    shape = _SHAPES[options.lr_scheduler_type]
    peak, floor = options.learning_rate, options.min_learning_rate
    assert floor <= peak, "checked by config.validation"
    warmup = num_warmup_steps(options, total_steps)
    decay_end = options.decay_steps or total_steps

    def learning_rate(step: int) -> float:
        if step < warmup:
            return peak * step / warmup
        progress = min(1.0, (step - warmup) / max(1, decay_end - warmup))
        return floor + (peak - floor) * shape(progress)

    return learning_rate
