"""Fused RMS norm and the linear layers after the norm, for decoding.

    s = x + addend        y = (s / sqrt(mean(s^2) + epsilon) * (offset + weight)) W^T + bias        for each layer

| backend | file | notes |
| --- | --- | --- |
| triton | triton.py | one launch for the sum, the norm and up to three layers over at most 16 positions |
| reference | reference.py | separate calls of `rms_norm` and of each linear layer |

fits_one_launch.py checks whether the Triton kernel supports the layers.

Shapes: D hidden, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import paddle

from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.norm_linear.reference import norm_linear_reference
from paddlenlp_ext.ops.norm_linear.triton import norm_linear_triton
from paddlenlp_ext.ops.triton_utils.launch import floats_on_gpu_with_triton

if TYPE_CHECKING:
    from paddlenlp_ext.ops.frozen_linear import FrozenLinear

norm_linear_op = DispatchedOp(
    "norm_linear", triton=(norm_linear_triton, floats_on_gpu_with_triton), reference=norm_linear_reference
)


def norm_linear(
    x: paddle.Tensor,
    linears: Sequence[FrozenLinear],
    weight_D: paddle.Tensor,
    epsilon: float,
    offset: float = 0.0,
    addend: paddle.Tensor | None = None,
) -> tuple[paddle.Tensor, list[paddle.Tensor]]:
    """Normalize `x + addend`, both [..., D], and apply each linear layer to the result.

    Returns:
        The sum `x + addend` [..., D] (x without an addend), and the outputs [..., O] of each layer.
    """
    return norm_linear_op.choose(x)(x, linears, weight_D, epsilon, offset, addend)
