"""The measured result of one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, measured.

    Attributes:
        loss: sum over the learned tokens of the whole window, divided by their number.
        grad_norm: of all gradients together, before clipping.
        num_tokens: tokens in the window without padding.
        num_learned: tokens of the window that the loss counts.
        num_rows: dataset rows in the window.
        seconds: wall-clock time from the window's start to the parameters' update.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_target_tokens: int
    num_rows: int
    seconds: float
