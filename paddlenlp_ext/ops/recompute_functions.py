"""Recompute functions for tensors that are cheaper to recompute than to save for the backward pass.

The op that computes such a tensor attaches a recompute function. A later op that needs the tensor in its backward pass
saves the recompute function. Tensors without a recompute function are saved as usual.
"""

from __future__ import annotations

from collections.abc import Callable

import paddle

RecomputeFunction = Callable[[], paddle.Tensor]


def with_recompute_function(x: paddle.Tensor, make: RecomputeFunction) -> paddle.Tensor:
    """Attach the recompute function `make` to `x` and return `x`; `make` must return the same bits as `x`."""
    x._recompute_function = (x.inplace_version, make)
    return x


def recompute_function(x: paddle.Tensor) -> RecomputeFunction | None:
    """Return the recompute function of `x`, or None if there is none or `x` was later modified in place."""
    version, make = getattr(x, "_recompute_function", (None, None))
    return make if version == x.inplace_version else None
