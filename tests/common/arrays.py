"""Helpers that run an op forward and backward, for tests that compare two implementations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import paddle

FLOAT32_ROUNDING = 2.0**-24 * math.sqrt(2 * 30 * 61)
"""Relative difference of two float32 computations of a tiny two-layer decoder whose sums have another order.

The difference is relative to the largest value of a tensor of logits or gradients. A sum of up to 61 terms (the
vocabulary) has an error of about sqrt(61) unit roundoffs. Errors of the about 30 matmuls, norms and softmaxes through
which a gradient depends on the weights, in both computations, add up like random numbers.
"""


def run_both_ways(
    op: Callable[..., paddle.Tensor], inputs: Sequence[np.ndarray], out_gradient: np.ndarray, frozen: Sequence[int] = ()
) -> list[np.ndarray | None]:
    """Return the output and the gradient of each input (None for inputs in `frozen`)."""
    tensors = [paddle.to_tensor(array, stop_gradient=index in frozen) for index, array in enumerate(inputs)]
    out = op(*tensors)
    out.backward(paddle.to_tensor(out_gradient))
    return [out.numpy(), *(None if tensor.grad is None else tensor.grad.numpy() for tensor in tensors)]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_all_close(actual: Sequence[np.ndarray | None], expected: Sequence[np.ndarray | None], atol: float) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=0, atol=atol)
