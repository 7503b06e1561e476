"""Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import paddle


def rms_norm_reference(x: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float) -> paddle.Tensor:
    """`x / sqrt(mean(x^2) + epsilon) * weight` over the last axis, the statistics in fp32 whatever the input."""
    x_fp32 = x.astype("float32")
    inverse_rms = paddle.rsqrt(x_fp32.square().mean(axis=-1, keepdim=True) + epsilon)
    return (x_fp32 * inverse_rms).astype(x.dtype) * weight_D


def rms_norm(x: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float) -> paddle.Tensor:
    """Normalise the last axis of `x` [..., D] and scale it by `weight_D`."""
    return rms_norm_reference(x, weight_D, epsilon)
