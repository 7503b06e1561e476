"""Tensor helpers of the ops: contiguity, casts, and whether gradients are needed."""

from __future__ import annotations

import paddle


def contiguous(x: paddle.Tensor) -> paddle.Tensor:
    """Return `x` if it is contiguous, otherwise a contiguous copy."""
    return x if x.is_contiguous() else x.contiguous()


def in_dtype(x: paddle.Tensor, dtype: paddle.dtype) -> paddle.Tensor:
    """Return `x` in `dtype` without the copy that a cast to its own dtype would make."""
    return x if x.dtype == dtype else x.astype(dtype)


def product_dtype(x: paddle.Tensor) -> paddle.dtype:
    """Return the dtype in which Paddle multiplies `x`: the autocast dtype if autocast is on, else the dtype of `x`."""
    return getattr(paddle, paddle.get_autocast_dtype()) if paddle.is_autocast_enabled() else x.dtype


def requires_grad(tensor: paddle.Tensor | None) -> bool:
    """Return whether `tensor` is not None and needs a gradient."""
    return tensor is not None and not tensor.stop_gradient


def needs_grad(*tensors: paddle.Tensor) -> bool:
    """Return whether autograd must record an op on these tensors."""
    return paddle.is_grad_enabled() and not all(tensor.stop_gradient for tensor in tensors)
