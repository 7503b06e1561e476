"""Helpers for contiguity, slices, dtypes and gradient flags of tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import paddle

from paddlenlp_ext.devices import device_name
from paddlenlp_ext.paddle_compat import is_symbolic

Indices = Any
"""Integer array; in a static graph, an integer tensor."""


def contiguous(x: paddle.Tensor) -> paddle.Tensor:
    """Return `x` if it is contiguous, otherwise a contiguous copy."""
    return x if x.is_contiguous() else x.contiguous()


def in_dtype(x: paddle.Tensor, dtype: paddle.dtype) -> paddle.Tensor:
    """Cast `x` to `dtype`; return `x` itself if it already has this dtype."""
    return x if x.dtype == dtype else x.astype(dtype)


def select(x: paddle.Tensor, slices: Sequence[slice] | None, axis: int) -> paddle.Tensor:
    """Return the concatenated slices of `x` along an axis; all of `x` if `slices` is None."""
    if slices is None:
        return x
    return paddle.concat([x.slice([axis], [each.start], [each.stop]) for each in slices], axis)


def gather_rows(x: paddle.Tensor, indices: Indices) -> paddle.Tensor:
    """Return the rows of `x` at the indices [I]."""
    return paddle.gather(x, indices if is_symbolic(indices) else paddle.to_tensor(indices))


def slices_share_memory(x: paddle.Tensor) -> bool:
    """Return whether slices of tensors on the device of `x` share memory with the tensor, instead of being copies.

    They are copies on devices whose plug-in has no kernels for strides, and with FLAGS_use_stride_kernel=0.
    """
    return _slices_share_memory(device_name(x.place))


@functools.cache
def _slices_share_memory(device: str) -> bool:
    whole = paddle.to_tensor([0.0, 0.0], place=device)
    whole[:1].add_(paddle.to_tensor([1.0], place=device))
    return bool(whole[0] == 1.0)


def bits_of(x: paddle.Tensor, dtype: str) -> paddle.Tensor:
    """Return the bits of a tensor as another dtype of the same size; copied through host memory without views."""
    if slices_share_memory(x):
        return x.view(getattr(paddle, dtype))
    return paddle.to_tensor(x.numpy().view(dtype), place=x.place)


def product_dtype(x: paddle.Tensor) -> paddle.dtype:
    """Return the dtype of Paddle's matmuls with `x`: the autocast dtype under autocast, else the dtype of `x`."""
    return getattr(paddle, paddle.get_autocast_dtype()) if paddle.is_autocast_enabled() else x.dtype


def requires_grad(tensor: paddle.Tensor | None) -> bool:
    """Return whether `tensor` is not None and needs a gradient."""
    return tensor is not None and not tensor.stop_gradient


def needs_grad(*tensors: paddle.Tensor) -> bool:
    """Return whether autograd is enabled and any of the tensors requires a gradient."""
    return paddle.is_grad_enabled() and not all(tensor.stop_gradient for tensor in tensors)
