"""Values that are cheaper to make again than to keep from the forward pass to the backward pass.

An op that makes such a value hangs its maker on it; an op that would keep the value for its gradient asks for the maker
and keeps that. Whoever does not ask keeps the value, as ever.
"""

from __future__ import annotations

from collections.abc import Callable

import paddle

RecomputeFunction = Callable[[], paddle.Tensor]


def with_recompute_function(x: paddle.Tensor, make: RecomputeFunction) -> paddle.Tensor:
    """`x` itself, which `make` gives once more, to the bit, from tensors that are kept anyway."""
    x._recompute_function = (x.inplace_version, make)
    return x


def recompute_function(x: paddle.Tensor) -> RecomputeFunction | None:
    """How to make `x` again; None where it must be kept, as where it was changed in place since."""
    version, make = getattr(x, "_recompute_function", (None, None))
    return make if version == x.inplace_version else None
