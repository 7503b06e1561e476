"""Product of the input and a dense weight update U, where the backward pass recomputes U to save memory.

    y = x U^T        U [out, in], a function of the adapter's parameters

An update without low-rank factors is as large as the weight, and autograd would save U and its intermediate results for
each layer.
"""

from __future__ import annotations

from collections.abc import Callable

import paddle
from paddle.autograd import PyLayer

Update = Callable[..., paddle.Tensor]


def product_with_update(x: paddle.Tensor, update: Update, *parameters: paddle.Tensor) -> paddle.Tensor:
    """Return x U^T [..., out] for U = update(*parameters); only x and the parameters are saved for the backward pass.

    Args:
        x: [..., in].
        update: differentiable function that returns U, float32 [out, in]. The forward and the backward pass call the
            function, outside autocast. Other tensors that `update` uses must not change between the two passes.
        parameters: parameters of the adapter.
    """
    if paddle.is_grad_enabled() and not all(tensor.stop_gradient for tensor in (x, *parameters)):
        return _UpdateProduct.apply(x, update, *parameters)
    return paddle.matmul(x, _value(update, parameters).astype(x.dtype), transpose_y=True)


def _value(update: Update, parameters: tuple[paddle.Tensor, ...]) -> paddle.Tensor:
    with paddle.amp.auto_cast(enable=False):
        return update(*parameters)


class _UpdateProduct(PyLayer):
    @staticmethod
    def forward(ctx, x, update, *parameters):
        ctx.update, ctx.needs_x_gradient = update, not x.stop_gradient
        ctx.trained = [not parameter.stop_gradient for parameter in parameters]
        ctx.save_for_backward(x, *parameters)
        return paddle.matmul(x, _value(update, parameters).astype(x.dtype), transpose_y=True)

    @staticmethod
    def backward(ctx, y_gradient):
        x, *saved = ctx.saved_tensor()
        y_gradient = y_gradient.astype(x.dtype)
        copies = tuple(parameter.detach() for parameter in saved)
        for copy, trained in zip(copies, ctx.trained, strict=True):
            copy.stop_gradient = not trained
        with paddle.enable_grad():
            value = _value(ctx.update, copies)
        rows, x_rows = y_gradient.flatten(0, -2), x.flatten(0, -2)
        of_value = paddle.matmul(rows, x_rows, transpose_x=True).astype(value.dtype)
        trained = [copy for copy in copies if not copy.stop_gradient]
        gradients = iter(paddle.grad([value], trained, [of_value]) if trained else [])
        of_x = paddle.matmul(y_gradient, value.detach().astype(x.dtype)) if ctx.needs_x_gradient else None
        return (of_x, *(next(gradients) if trained else None for trained in ctx.trained))
