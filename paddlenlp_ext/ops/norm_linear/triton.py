"""Launch the Triton kernel of RMS norm and linear layers over few positions.

Decoding with a small batch is limited by launches and by reading the weights. The kernel saves three or four launches
in the attention block of a decoder layer and two or three in its feed-forward block, and reads quantized weights only
once for all positions.

Tested in Triton's interpreter on the CPU (tests/ops/norm_linear/test_triton.py), except for the launch itself.
Not yet run on a GPU with Paddle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import paddle

from paddlenlp_ext.ops.norm_linear.reference import norm_linear_reference
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.ops.tensor_utils import contiguous, needs_grad
from paddlenlp_ext.ops.triton_utils.launch import empty_beside, launch

if TYPE_CHECKING:
    from paddlenlp_ext.ops.frozen_linear import FrozenDense, FrozenQuantized


MOST_POSITIONS = 16
"""Positions up to which the kernel is used: the columns of its tiles."""


def norm_linear_triton(
    x: paddle.Tensor,
    linears: Sequence[FrozenDense | FrozenQuantized],
    weight_D: paddle.Tensor,
    epsilon: float,
    offset: float = 0.0,
    addend: paddle.Tensor | None = None,
) -> tuple[paddle.Tensor, list[paddle.Tensor]]:
    """Compute `norm_linear` in one launch, or with the reference if the kernel does not support the arguments."""
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


def supports(
    x: paddle.Tensor,
    linears: Sequence[FrozenDense | FrozenQuantized],
    weight_D: paddle.Tensor,
    addend: paddle.Tensor | None,
) -> bool:
    """Return whether one launch can compute these layers: few positions, one format, no gradients and no autocast."""
    if not 0 < math.prod(x.shape[:-1]) <= MOST_POSITIONS or not 0 < len(linears) <= 3 or paddle.is_autocast_enabled():
        return False
    if paddle.is_grad_enabled():
        tensors = [x, weight_D, *(each.bias for each in linears), *(each.weight for each in linears), addend]
        if needs_grad(*(each for each in tensors if isinstance(each, paddle.Tensor))):
            return False
    formats = {_comparable_format(linear, x.dtype) for linear in linears}
    return len(formats) == 1 and None not in formats


def _comparable_format(linear: FrozenDense | FrozenQuantized, dtype: paddle.dtype) -> tuple | None:
    """Return the format that all layers of a launch must share; None if the kernel does not support the layer."""
    if not linear.fits_tiles(dtype):
        return None
    weight, bias = linear.weight, None if linear.bias is None else linear.bias.dtype
    if isinstance(weight, QuantizedWeight):
        return weight.algo, weight.block_size, weight.group_size, bias
    return weight.dtype, bias
