"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, arXiv:1710.03740).

In float16, gradients below 3e-8 underflow to zero, and gradients above 65504 overflow to infinity. The loss is
multiplied by a loss scale before the backward pass, and gradients are divided by the loss scale before clipping. Steps
with overflowing gradients are skipped.

The scale follows the rule of `paddle.amp.GradScaler`:

    after `decr_every_n` overflows without a finite step between them    scale * decr_ratio
    after `incr_every_n_steps` consecutive finite steps                  scale * incr_ratio

All processes agree on whether a step overflowed (train_step.py), and therefore have the same loss scale.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScalingRule:
    """Rule that raises and lowers the loss scale, with the defaults of `paddle.amp.GradScaler`.

    Attributes:
        incr_ratio: factor that raises the scale.
        decr_ratio: factor that lowers the scale.
        incr_every_n_steps: number of consecutive finite steps before the scale is raised.
        decr_every_n: number of overflows before the scale is lowered.
        minimum: minimum scale; `nan_policy` handles an overflow at this scale.
    """

    incr_ratio: float = 2.0
    decr_ratio: float = 0.5
    incr_every_n_steps: int = 2000
    decr_every_n: int = 1
    minimum: float = 1.0


GRAD_SCALER = ScalingRule()


@dataclass
class LossScale:
    """Dynamic loss scale and the step counts that decide its next change; stored in trainer_state.json.

    Attributes:
        scale: factor by which the loss is multiplied.
        num_finite_steps: finite steps since the last change or overflow.
        num_overflows: overflows since the last change or finite step.
    """

    scale: float
    num_finite_steps: int = 0
    num_overflows: int = 0

    def is_minimal(self) -> bool:
        """Return whether the scale has reached its minimum."""
        return self.scale <= GRAD_SCALER.minimum

    def update(self, *, overflow: bool, rule: ScalingRule = GRAD_SCALER) -> None:
        """Count a finite or overflowing step, and raise or lower the scale as `rule` requires."""
        if overflow:
            self.num_finite_steps, self.num_overflows = 0, self.num_overflows + 1
            if self.num_overflows == rule.decr_every_n:
                self.scale, self.num_overflows = max(self.scale * rule.decr_ratio, rule.minimum), 0
        else:
            self.num_finite_steps, self.num_overflows = self.num_finite_steps + 1, 0
            if self.num_finite_steps == rule.incr_every_n_steps:
                self.scale, self.num_finite_steps = self.scale * rule.incr_ratio, 0
