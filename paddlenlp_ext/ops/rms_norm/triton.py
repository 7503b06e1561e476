"""RMS norm of Paddle tensors with the Triton kernels in kernels.py.

Weight gradients are bitwise reproducible. Tested in Triton's interpreter on the CPU
(tests/ops/rms_norm/test_triton.py), except for the launch itself. Not yet run on a GPU with Paddle.

Shapes: D row length.
"""

from __future__ import annotations

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.tensor_utils import in_dtype, needs_grad
from paddlenlp_ext.ops.triton_utils.launch import empty_beside, evenly_spaced_rows, launch


def rms_norm_triton(x: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float, offset: float = 0.0) -> paddle.Tensor:
    """Normalize the last axis of x [..., D]; the rows of x may be slices of longer rows."""
    if needs_grad(x, weight_D):
        return _RmsNorm.apply(x, weight_D, epsilon, offset)
    return _forward(x, None, weight_D, epsilon, offset)[1]


def add_rms_norm_triton(
    x: paddle.Tensor, addend: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float, offset: float = 0.0
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return `x + addend` and the normalized sum, both [..., D] in the dtype of `x`, computed in one pass.

    A float32 x may have an addend in half precision, because matmuls under autocast return half precision.
    """
    assert x.shape == addend.shape, f"{x.shape}, {addend.shape}"
    assert x.dtype in (addend.dtype, paddle.float32), f"{addend.dtype} would be rounded to {x.dtype}"
    if needs_grad(x, addend, weight_D):
        return _AddRmsNorm.apply(x, addend, weight_D, epsilon, offset)
    return _forward(x, addend, weight_D, epsilon, offset)[:2]


class _RmsNorm(PyLayer):
    @staticmethod
    def forward(ctx, x, weight_D, epsilon, offset):
        x, out, ctx.x_stride = _forward(x, None, weight_D, epsilon, offset)
        ctx.save_for_backward(x, weight_D)
        ctx.numbers, ctx.grads_needed = (epsilon, offset), [not each.stop_gradient for each in (x, weight_D)]
        return out

    @staticmethod
    def backward(ctx, gradient):
        x, weight_D = ctx.saved_tensor()
        x_gradient, weight_gradient = _backward(ctx, gradient, x, ctx.x_stride, weight_D, ctx.grads_needed[1], None)
        # Paddle rejects gradients for frozen inputs.
        return x_gradient if ctx.grads_needed[0] else None, weight_gradient


class _AddRmsNorm(PyLayer):
    @staticmethod
    def forward(ctx, x, addend, weight_D, epsilon, offset):
        total, out, _ = _forward(x, addend, weight_D, epsilon, offset)
        ctx.save_for_backward(total, weight_D)
        ctx.numbers, ctx.grads_needed = (epsilon, offset), [not each.stop_gradient for each in (x, addend, weight_D)]
        ctx.addend_dtype = addend.dtype
        return total, out

    @staticmethod
    def backward(ctx, total_gradient, gradient):
        total, weight_D = ctx.saved_tensor()
        of_x, of_addend, of_weight = ctx.grads_needed
        shared, weight_gradient = _backward(
            ctx, gradient, total, total.shape[-1], weight_D, of_weight, total_gradient.contiguous()
        )
        other = in_dtype(shared, ctx.addend_dtype) if of_addend else None
        if of_x and other is shared:
            other = shared.clone()  # Paddle may add other gradients to a gradient in place
        return shared if of_x else None, other, weight_gradient


def _forward(
    x: paddle.Tensor, addend: paddle.Tensor | None, weight_D: paddle.Tensor, epsilon: float, offset: float
) -> tuple[paddle.Tensor, paddle.Tensor, int]:
    """Return the input of the norm (x + addend, or x with evenly spaced rows), the output, and the row stride of x."""
    from paddlenlp_ext.ops.rms_norm.kernels import launch_forward

    assert weight_D.shape == [x.shape[-1]], f"weight of shape {weight_D.shape} does not match rows of {x.shape[-1]}"
    x, x_stride = evenly_spaced_rows(x)
    out, total = empty_beside(x), None
    if addend is not None:
        addend, total = addend.contiguous(), empty_beside(x)
    launch_forward(launch, x, x_stride, weight_D.contiguous(), out, epsilon, offset, addend, total)
    return x if total is None else total, out, x_stride


def _backward(
    ctx,
    gradient: paddle.Tensor,
    x: paddle.Tensor,
    x_stride: int,
    weight_D: paddle.Tensor,
    of_weight: bool,
    total_gradient: paddle.Tensor | None,
) -> tuple[paddle.Tensor, paddle.Tensor | None]:
    """Return the gradient of x, plus `total_gradient` if given, and the weight gradient or None."""
    from paddlenlp_ext.ops.rms_norm.kernels import launch_backward, num_partials
    from paddlenlp_ext.ops.triton_utils.column_sums import launch_column_sums

    x_gradient = empty_beside(x)
    partials = empty_beside(x, [num_partials(x), x.shape[-1]], paddle.float32) if of_weight else None
    gradient, weight_D, (epsilon, offset) = gradient.contiguous(), weight_D.contiguous(), ctx.numbers
    launch_backward(launch, gradient, x, x_stride, weight_D, x_gradient, epsilon, offset, total_gradient, partials)
    if partials is None:
        return x_gradient, None
    weight_gradient = empty_beside(weight_D)
    launch_column_sums(launch, partials, weight_gradient)
    return x_gradient, weight_gradient
