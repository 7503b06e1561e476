"""Rotary position embedding in plain Paddle.

Shapes: B batch, S sequence, N heads, H head dimension, R rotated channels of a head, P unrotated channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import paddle


@dataclass(frozen=True)
class HeadNorms:
    """QK norms: RMS norms over the channels of each query head and key head.

    Attributes:
        q_weight, k_weight: weights [H] of the query norm and the key norm, shared by all heads.
        epsilon, offset: constants of the RMS norm formula (ops/rms_norm).
        after_rotation: True to apply the norms after the rotation; False to apply the norms before the rotation.
    """

    q_weight: paddle.Tensor
    k_weight: paddle.Tensor
    epsilon: float
    offset: float = 0.0
    after_rotation: bool = False


def rope_reference(
    x_BSNH: paddle.Tensor, cos_BSR: paddle.Tensor, sin_BSR: paddle.Tensor, interleaved: bool = False
) -> paddle.Tensor:
    """Rotate each pair of channels in fp32."""
    rotary_dim = cos_BSR.shape[-1]
    x, rest_BSNP = x_BSNH[..., :rotary_dim].astype("float32"), x_BSNH[..., rotary_dim:]
    if interleaved:
        cos_BSR, sin_BSR = interleave(cos_BSR), interleave(sin_BSR)
        turned = paddle.stack([-x[..., 1::2], x[..., 0::2]], axis=-1).flatten(-2)
    else:
        first, second = paddle.chunk(x, 2, axis=-1)
        turned = paddle.concat([-second, first], axis=-1)
    rotated = (x * cos_BSR.unsqueeze(2) + turned * sin_BSR.unsqueeze(2)).astype(x_BSNH.dtype)
    return paddle.concat([rotated, rest_BSNP], axis=-1) if rest_BSNP.shape[-1] else rotated


def interleave(table_BSR: paddle.Tensor) -> paddle.Tensor:
    """Reorder the angles of a table from [0, 1, ..., 0, 1, ...] to [0, 0, 1, 1, ...], for interleaved pairs."""
    return paddle.repeat_interleave(table_BSR[..., : table_BSR.shape[-1] // 2], 2, axis=-1)
