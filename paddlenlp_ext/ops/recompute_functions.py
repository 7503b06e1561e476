"""Recompute functions for tensors that are cheaper to recompute than to save for the backward pass.

The op that computes a cheap tensor attaches a recompute function to the tensor. A later op that needs the tensor in its
backward pass saves the recompute function. Tensors without a recompute function are saved as usual.
"""

from __future__ import annotations

from collections.abc import Callable

import paddle

RecomputeFunction = Callable[[], paddle.Tensor]


def with_recompute_function(
    x: paddle.Tensor, make: RecomputeFunction, make_bf16: RecomputeFunction | None = None
) -> paddle.Tensor:
    """Attach the recompute function `make` to `x` and return `x`; `make` must return the same bits as `x`.

    `make_bf16`, if given, must return the same bits as `x` rounded to bfloat16.
    """
    x._recompute_function = (x.inplace_version, make, make_bf16)
    return x


def recompute_function(x: paddle.Tensor, in_bf16: bool = False) -> RecomputeFunction | None:
    """Return the recompute function of `x`, or None if there is none or `x` was later modified in place.

    With `in_bf16`, which is for callers that round `x` to bfloat16, the function may return the rounded tensor.
    """
    version, make, make_bf16 = getattr(x, "_recompute_function", (None, None, None))
    if version != x.inplace_version:
        return None
    return make_bf16 if in_bf16 and make_bf16 is not None else make
