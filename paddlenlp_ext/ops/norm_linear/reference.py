"""RMS norm and linear layers as separate ops, each with the best available backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import paddle

from paddlenlp_ext.ops.rms_norm import add_rms_norm, rms_norm

if TYPE_CHECKING:
    from paddlenlp_ext.ops.frozen_linear import FrozenLinear


def norm_linear_reference(
    x: paddle.Tensor,
    linears: Sequence[FrozenLinear],
    weight_D: paddle.Tensor,
    epsilon: float,
    offset: float = 0.0,
    addend: paddle.Tensor | None = None,
) -> tuple[paddle.Tensor, list[paddle.Tensor]]:
    """Compute `norm_linear` with separate, differentiable ops."""
    if addend is None:
        total, normed = x, rms_norm(x, weight_D, epsilon, offset)
    else:
        total, normed = add_rms_norm(x, addend, weight_D, epsilon, offset)
    return total, [linear(normed) for linear in linears]
