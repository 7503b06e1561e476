"""RMS norm fused with the linear layers that read its result, for decoding.

    s = x + addend        y = (s / sqrt(mean(s^2) + epsilon) * (offset + weight)) W^T + bias        for each layer

| backend | file | notes |
| --- | --- | --- |
| triton | triton.py | one launch for the sum, the norm and up to three layers over at most 16 positions |
| reference | reference.py | `rms_norm` and the linear layers, called one by one |

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
    from paddlenlp_ext.ops.frozen_linear import FrozenDense, FrozenQuantized

norm_linear_op = DispatchedOp(
    "norm_linear", triton=(norm_linear_triton, floats_on_gpu_with_triton), reference=norm_linear_reference
)


def norm_linear(
    x: paddle.Tensor,
    linears: Sequence[FrozenDense | FrozenQuantized],
    weight_D: paddle.Tensor,
    epsilon: float,
    offset: float = 0.0,
    addend: paddle.Tensor | None = None,
) -> tuple[paddle.Tensor, list[paddle.Tensor]]:
    """Normalize `x + addend`, both [..., D], and apply each linear layer to the result.

    Returns:
        The sum `x + addend` [..., D] (x if there is no addend), and the outputs [..., O] of each layer.
    """
    return norm_linear_op.choose(x)(x, linears, weight_D, epsilon, offset, addend)
