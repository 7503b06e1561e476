"""Recompute functions for tensors that are cheaper to recompute than to save for the backward pass.

The op that produces such a tensor attaches a recompute function. An op that would save the tensor for its own backward
pass looks for this function and saves it instead. All other ops save the tensor as usual.
"""

from __future__ import annotations

from collections.abc import Callable

import paddle

RecomputeFunction = Callable[[], paddle.Tensor]


def with_recompute_function(x: paddle.Tensor, make: RecomputeFunction) -> paddle.Tensor:
    """Attach the recompute function `make` to `x`; it computes equal bits from tensors that are saved anyway."""
    x._recompute_function = (x.inplace_version, make)
    return x


def recompute_function(x: paddle.Tensor) -> RecomputeFunction | None:
    """Return the recompute function of `x`, or None if there is none or `x` was changed in place since."""
    version, make = getattr(x, "_recompute_function", (None, None))
    return make if version == x.inplace_version else None
