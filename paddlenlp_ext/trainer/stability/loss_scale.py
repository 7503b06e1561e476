"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, arXiv:1710.03740).

A gradient below 6e-8 is zero in float16, and a gradient above 65504 is infinite. The loss is multiplied by a scale
before the backward pass, and gradients are divided by it before clipping. A step whose gradients overflow is skipped.

The scale follows the rule of `paddle.amp.GradScaler`:

    after `decr_every_n` overflows without a finite step between them    scale * decr_ratio
    after `incr_every_n_steps` consecutive finite steps                  scale * incr_ratio

All processes see the same overflows (train_step.py) and therefore hold the same scale.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScalingRule:
    """Growth and backoff of the scale, with the defaults of `paddle.amp.GradScaler`.

    Attributes:
        incr_ratio: factor of the scale after many finite steps.
        decr_ratio: factor of the scale after overflows.
        incr_every_n_steps: consecutive finite steps that raise the scale.
        decr_every_n: overflows that lower the scale.
        minimum: smallest scale; an overflow at this scale is treated as a non-finite step.
    """

    incr_ratio: float = 2.0
    decr_ratio: float = 0.5
    incr_every_n_steps: int = 2000
    decr_every_n: int = 1
    minimum: float = 1.0


GRAD_SCALER = ScalingRule()


@dataclass
class LossScale:
    """Dynamic loss scale with the step counts for its next change; stored in trainer_state.json.

    Attributes:
        scale: factor of the loss.
        num_finite_steps: finite steps since the last change or overflow.
        num_overflows: overflows since the last change or finite step.
    """

    scale: float
    num_finite_steps: int = 0
    num_overflows: int = 0

    def is_minimal(self, rule: ScalingRule = GRAD_SCALER) -> bool:
        """Return whether the scale has reached its minimum."""
        return self.scale <= rule.minimum

    def update(self, *, overflow: bool, rule: ScalingRule = GRAD_SCALER) -> None:
        """Count a step, and raise or lower the scale if its rule says so."""
        if overflow:
            self.num_finite_steps, self.num_overflows = 0, self.num_overflows + 1
            if self.num_overflows == rule.decr_every_n:
                self.scale, self.num_overflows = max(self.scale * rule.decr_ratio, rule.minimum), 0
        else:
            self.num_finite_steps, self.num_overflows = self.num_finite_steps + 1, 0
            if self.num_finite_steps == rule.incr_every_n_steps:
                self.scale, self.num_finite_steps = self.scale * rule.incr_ratio, 0
