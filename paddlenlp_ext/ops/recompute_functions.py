"""Recompute functions for tensors that are cheaper to recompute than to save for the backward pass.

The op that produces such a tensor attaches a recompute function. An op that needs the tensor in its backward pass looks
for this function and saves it instead of the tensor. Other ops save the tensor as usual.
"""

from __future__ import annotations

from collections.abc import Callable

import paddle

RecomputeFunction = Callable[[], paddle.Tensor]


def with_recompute_function(x: paddle.Tensor, make: RecomputeFunction) -> paddle.Tensor:
    """Attach the recompute function `make` to `x`; it reproduces x bitwise from tensors that are saved anyway."""
    x._recompute_function = (x.inplace_version, make)
    return x


def recompute_function(x: paddle.Tensor) -> RecomputeFunction | None:
    """Return the recompute function of `x`; None if `x` has none or was modified in place since it was attached."""
    version, make = getattr(x, "_recompute_function", (None, None))
    return make if version == x.inplace_version else None
