"""Check whether one kernel launch can compute an RMS norm and several linear layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import paddle

from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.ops.tensor_utils import needs_grad

if TYPE_CHECKING:
    from paddlenlp_ext.ops.frozen_linear import FrozenLinear

MOST_POSITIONS = 16
"""Maximum number of positions that the kernel supports."""


def supports(
    x: paddle.Tensor, linears: Sequence[FrozenLinear], weight_D: paddle.Tensor, addend: paddle.Tensor | None
) -> bool:
    """Return whether one launch can compute the layers.

    The launch supports at most `MOST_POSITIONS` positions, and one to three layers with weights of the same format,
    without gradients and autocast.
    """
    if not 0 < math.prod(x.shape[:-1]) <= MOST_POSITIONS or not 0 < len(linears) <= 3 or paddle.is_autocast_enabled():
        return False
    if paddle.is_grad_enabled():
        tensors = [x, weight_D, *(each.bias for each in linears), *(each.weight for each in linears), addend]
        if needs_grad(*(each for each in tensors if isinstance(each, paddle.Tensor))):
            return False
    formats = {_storage_format(linear, x.dtype) for linear in linears}
    return len(formats) == 1 and None not in formats


def _storage_format(linear: FrozenLinear, dtype: paddle.dtype) -> tuple | None:
    """Return the storage format of a layer's weight and bias; None if the kernel does not support the layer."""
    if not linear.fits_tiles(dtype):
        return None
    weight, bias = linear.weight, None if linear.bias is None else linear.bias.dtype
    if isinstance(weight, QuantizedWeight):
        return weight.algo, weight.block_size, weight.group_size, bias
    return weight.dtype, bias
