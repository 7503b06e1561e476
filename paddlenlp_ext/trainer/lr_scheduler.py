"""Learning rate as a pure function of the optimizer step, so that checkpoints need no scheduler state.

    warm-up                      decay
    0 -> learning_rate, linear   toward min_learning_rate by lr_scheduler_type (below), until step decay_steps

Step 0 is the first optimizer step. The learning rate of step 0 is 0 if the run has a warm-up, as in PaddleNLP and
Transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from paddlenlp_ext.config.sections.optim import OptimConfig
from paddlenlp_ext.utils.logging import get_logger

Schedule = Callable[[int], float]
"""Function that maps the number of completed optimizer steps to the learning rate of the next step."""

_DECAYS: dict[str, Callable[[float, OptimConfig], float]] = {
    "linear": lambda progress, _: 1.0 - progress,
    "cosine": lambda progress, options: _cosine(2.0 * (options.num_cycles or 0.5) * progress),
    "cosine_with_restarts": lambda progress, options: (
        0.0 if progress == 1.0 else _cosine((options.num_cycles or 1.0) * progress % 1.0)
    ),
    "polynomial": lambda progress, options: (1.0 - progress) ** options.power,
    "warmup_stable_decay": lambda progress, _: _cosine(progress),
    "constant": lambda *_: 1.0,
    "constant_with_warmup": lambda *_: 1.0,
}
"""lr_scheduler_type -> (rate - floor) / (peak - floor) as a function of the decay's progress from 0 to 1."""
_STEPS_WITHOUT_WARMUP = 10_000
"""Time scale of `inverse_sqrt` without warm-up, as in transformers."""


def _cosine(half_periods: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * half_periods))


def num_warmup_steps(options: OptimConfig, total_steps: int) -> int:
    """Return `warmup_steps` if it is above 0, else `warmup_ratio` times `total_steps`, rounded up."""
    if options.warmup_steps > 0:
        return options.warmup_steps
    return math.ceil(options.warmup_ratio * total_steps - 1e-9)


def warn_of_full_warmup(options: OptimConfig, total_steps: int) -> None:
    """Log a warning if the warm-up takes all steps."""
    if num_warmup_steps(options, total_steps) >= total_steps:
        get_logger(__name__).warning(
            "warm-up takes all %d steps, so learning_rate is not reached; lower warmup_steps or warmup_ratio",
            total_steps,
        )


def build_schedule(options: OptimConfig, total_steps: int) -> Schedule:
    """Return the schedule of `lr_scheduler_type` over `total_steps` optimizer steps."""
    peak, floor = options.learning_rate, options.final_learning_rate
    assert floor <= peak, "checked by config.validation"
    warmup = num_warmup_steps(options, total_steps)
    fraction = _fraction_after_warmup(options, warmup, options.decay_steps or total_steps)

    def learning_rate(step: int) -> float:
        if step < warmup:
            return peak * step / warmup
        return floor + (peak - floor) * fraction(step)

    return learning_rate


def _fraction_after_warmup(options: OptimConfig, warmup: int, end: int) -> Schedule:
    """Return (rate - floor) / (peak - floor) as a function of the step, for steps after the warm-up."""
    if options.lr_scheduler_type == "inverse_sqrt":
        scale = warmup or _STEPS_WITHOUT_WARMUP
        return lambda step: math.sqrt(scale / (step - warmup + scale))
    decay = _DECAYS[options.lr_scheduler_type]
    start = warmup
    if options.lr_scheduler_type == "warmup_stable_decay":
        length = options.num_decay_steps or math.ceil(0.1 * (end - warmup))
        start = max(warmup, end - length)
    return lambda step: decay(min(1.0, max(0, step - start) / max(1, end - start)), options)
