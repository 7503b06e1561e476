"""Linear layer with an unquantized weight, in C++ (csrc/linear.cpp).

The matmuls have float32 inputs, or round their inputs to bfloat16; sums are float32 (ops/cpp/bf16.py).
"""

from __future__ import annotations

import math

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.cpp.bf16 import as_bf16, cached_bf16, matmul_operand, uses_bf16
from paddlenlp_ext.ops.recompute_functions import recompute_function
from paddlenlp_ext.ops.tensor_utils import contiguous, requires_grad


def linear_cpp(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None = None) -> paddle.Tensor:
    """Compute `linear` in C++; for a trainable weight, save x in the dtype of the matmul inputs."""
    x, weight, bias = contiguous(x), matmul_operand(weight), None if bias is None else matmul_operand(bias)
    if paddle.is_grad_enabled() and any(requires_grad(each) for each in (x, weight, bias)):
        return _Linear.apply(x, weight, bias)
    return _forward(x, weight, bias)


def _forward(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None) -> paddle.Tensor:
    """Return the outputs without autograd, for a contiguous float32 x and a float32 or bfloat16 weight.

    Raises:
        ValueError: the shapes do not match.
    """
    leading = x.shape[:-1]
    if x.shape[-1] != weight.shape[1] or (bias is not None and bias.shape != [weight.shape[0]]):
        bias_part = "" if bias is None else f" and a bias of shape {list(bias.shape)}"
        raise ValueError(
            f"linear: shapes do not match: x {list(x.shape)} with a weight of shape {list(weight.shape)}{bias_part}"
        )
    y = library.empty([*leading, weight.shape[0]])
    in_bf16 = uses_bf16(weight)
    name = "linear_forward"
    if math.prod(leading) <= library.small_batch_rows(in_bf16):
        name, in_bf16 = "linear_small_batch", False
    operand = as_bf16(weight) if in_bf16 else weight
    _call(name, (cached_bf16(x) if in_bf16 else x, operand, bias, y), weight, operand.dtype == paddle.bfloat16)
    return y


def linear_input_gradient_cpp(gradient: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
    """Return the input gradient (dL/dy) W, float32 [..., in], for a float32 or bfloat16 dL/dy [..., out]."""
    weight, in_bf16 = matmul_operand(weight), gradient.dtype == paddle.bfloat16
    x_gradient = library.empty([*gradient.shape[:-1], weight.shape[1]])
    operand = as_bf16(weight) if in_bf16 else weight
    _call("linear_input_gradient", (gradient, operand, x_gradient), weight, in_bf16)
    return x_gradient


class _Linear(PyLayer):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.in_bf16 = uses_bf16(weight)
        ctx.grads_needed = [requires_grad(each) for each in (x, weight, bias)]
        ctx.num_inputs = 2 if bias is None else 3
        ctx.recompute_x = recompute_function(x, ctx.in_bf16)
        saves_x = requires_grad(weight) and ctx.recompute_x is None
        ctx.save_for_backward(weight, *([_saved_input(x, weight)] if saves_x else []))
        return _forward(x, weight, bias)

    @staticmethod
    def backward(ctx, y_gradient):
        weight, *saved = ctx.saved_tensor()
        gradient = contiguous(y_gradient)
        operand = as_bf16(gradient) if ctx.in_bf16 else gradient
        gradients: list[paddle.Tensor | None] = [None, None, None]
        if ctx.grads_needed[0]:
            gradients[0] = linear_input_gradient_cpp(operand, weight)
        if ctx.grads_needed[1]:
            weight_gradient = gradients[1] = library.empty(weight.shape)
            x = saved[0] if saved else ctx.recompute_x()
            x = as_bf16(x) if ctx.in_bf16 else x
            _call("linear_weight_gradient", (operand, x, weight_gradient), weight, ctx.in_bf16)
            if weight.dtype == paddle.bfloat16:
                gradients[1] = as_bf16(weight_gradient)
        if ctx.grads_needed[2]:
            bias_gradient = gradients[2] = library.empty([weight.shape[0]])
            run, rows = library.function("linear_bias_gradient"), math.prod(gradient.shape[:-1])
            run(library.pointer(gradient), library.pointer(bias_gradient), rows, weight.shape[0])
        return tuple(gradients[: ctx.num_inputs])


def _call(name: str, tensors: tuple[paddle.Tensor | None, ...], weight: paddle.Tensor, in_bf16: bool) -> None:
    """Call an entry point of csrc/linear.cpp; the sizes are read from the first tensor and `weight`."""
    assert tensors[0] is not None
    rows, (out, in_) = math.prod(tensors[0].shape[:-1]), weight.shape
    addresses = [None if each is None else library.pointer(each) for each in tensors]
    library.function(name)(*addresses, rows, in_, out, in_bf16)


def _saved_input(x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
    return cached_bf16(x) if uses_bf16(weight) else x
