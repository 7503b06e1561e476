"""RMS norm in plain Paddle."""

from __future__ import annotations

import paddle


def rms_norm_reference(x: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float, offset: float = 0.0) -> paddle.Tensor:
    """Normalize the last axis; the mean square is computed in fp32 for any input dtype."""
    x_fp32 = x.astype("float32")
    inverse_rms = paddle.rsqrt(x_fp32.square().mean(axis=-1, keepdim=True) + epsilon)
    return (x_fp32 * inverse_rms).astype(x.dtype) * scale_of(weight_D, offset).astype(x.dtype)


def scale_of(weight_D: paddle.Tensor, offset: float) -> paddle.Tensor:
    """Return the scale of the norm, `offset + weight_D`."""
    return weight_D if offset == 0.0 else weight_D + offset
