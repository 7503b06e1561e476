"""Comparison of a merged model's logits with the logits of the trained model, on fixed prompts."""

from __future__ import annotations

import numpy as np
import paddle
from paddle import nn

TOLERANCE = 1e-4
"""Allowed logit difference, relative to the largest logit (at least 1). Float32 sums depend on the summation order."""
_SHAPE = (4, 24)


def fixed_prompts(vocab_size: int) -> paddle.Tensor:
    """Return prompts of random token ids that are the same in every run."""
    return paddle.to_tensor(np.random.default_rng(0).integers(0, vocab_size, _SHAPE))


@paddle.no_grad()
def logits_of(model: nn.Layer, input_ids: paddle.Tensor) -> np.ndarray:
    """Return the logits of a model in evaluation mode, float32 [B, S, V]."""
    model.eval()
    return model(input_ids).astype("float32").numpy()


def largest(difference: np.ndarray) -> float:
    """Return the largest absolute value of an array."""
    return float(np.abs(difference).max())


def require_equal_logits(logits: np.ndarray, expected: np.ndarray, what: str, reference: str) -> None:
    """Check that two models compute the same logits.

    Args:
        logits, expected: logits of both models.
        what, reference: the models, for the error message.

    Raises:
        ValueError: a logit differs by more than the tolerance, or is NaN.
    """
    difference, allowed = largest(logits - expected), TOLERANCE * max(1.0, largest(expected))
    if not difference <= allowed:  # also true for NaN
        raise ValueError(
            f"{what} and {reference} differ by {difference:.3g} in a logit ({allowed:.3g} is allowed); "
            "nothing is written"
        )
