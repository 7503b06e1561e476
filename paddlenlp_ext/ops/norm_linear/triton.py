"""Launch the Triton kernel of RMS norm and linear layers over few positions.

Launch overhead and weight reads limit the speed of decoding with a small batch. The kernel saves three or four launches
in a decoder layer's attention block, and two or three launches in the feed-forward block. Quantized weights are read
once for all positions.

Tested in Triton's interpreter on the CPU (tests/ops/norm_linear/test_triton.py), except for the launch itself.
Not yet run on a GPU with Paddle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import paddle

from paddlenlp_ext.ops.norm_linear.fits_one_launch import supports
from paddlenlp_ext.ops.norm_linear.reference import norm_linear_reference
from paddlenlp_ext.ops.tensor_utils import contiguous
from paddlenlp_ext.ops.triton_utils.launch import empty_beside, launch

if TYPE_CHECKING:
    from paddlenlp_ext.ops.frozen_linear import FrozenLinear


def norm_linear_triton(
    x: paddle.Tensor,
    linears: Sequence[FrozenLinear],
    weight_D: paddle.Tensor,
    epsilon: float,
    offset: float = 0.0,
    addend: paddle.Tensor | None = None,
) -> tuple[paddle.Tensor, list[paddle.Tensor]]:
    """Compute `norm_linear` in one launch; use the reference for arguments that the kernel does not support."""
    if not supports(x, linears, weight_D, addend):
        return norm_linear_reference(x, linears, weight_D, epsilon, offset, addend)
    from paddlenlp_ext.ops.norm_linear.kernels import launch_norm_linear

    x, addend = contiguous(x), None if addend is None else contiguous(addend)
    ys = [empty_beside(x, [*x.shape[:-1], linear.weight.shape[0]]) for linear in linears]
    layers = [linear.tile_layer(y) for linear, y in zip(linears, ys, strict=True)]
    total = None if addend is None else empty_beside(x)
    launch_norm_linear(
        launch, x, layers, linears[0].tile_format(), contiguous(weight_D), epsilon, offset, addend=addend, total=total
    )
    return x if total is None else total, ys
