"""A dense layer, `x @ weight^T + bias`.

The native twin of `linear`: products in float32, or in bfloat16 with sums in float32 (see half.py).
"""

from __future__ import annotations

import math

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.cpu import bf16, library
from paddlenlp_ext.ops.cpu.bf16 import as_half, cached_bf16, halves
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.saved_tensors import maker

SMALL_BATCH_ROWS = 8
"""Up to here a product costs what reading the weight costs, and a loop over its rows is the fastest (generation)."""


def linear_native(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None = None) -> paddle.Tensor:
    """As `linear`. Keeps x only for a weight that trains, and then as the products read it."""
    x, weight, bias = in_one_piece(x), readable(weight), None if bias is None else readable(bias)
    if paddle.is_grad_enabled() and any(wants_gradient(each) for each in (x, weight, bias)):
        return _Linear.apply(x, weight, bias)
    return forward(x, weight, bias)


def forward(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None) -> paddle.Tensor:
    """The values alone: x float32 in one piece, the weight float32 or bfloat16.

    Raises:
        ValueError: shapes that do not fit.
    """
    leading = x.shape[:-1]
    if x.shape[-1] != weight.shape[1] or (bias is not None and bias.shape != [weight.shape[0]]):
        beside = "" if bias is None else f" and a bias of shape {list(bias.shape)}"
        raise ValueError(f"a linear of x {list(x.shape)} with a weight of shape {list(weight.shape)}{beside}")
    y = library.empty([*leading, weight.shape[0]])
    name = "linear_small_batch" if math.prod(leading) <= SMALL_BATCH_ROWS else "linear_forward"
    rounds = name == "linear_forward" and halves(weight)
    read = as_half(weight) if rounds else weight
    _call(name, (cached_bf16(x) if rounds else x, read, bias, y), weight, read.dtype == paddle.bfloat16)
    return y


def input_gradient(gradient: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
    """(dL/dy) W, float32 [..., in], from dL/dy [..., out] in one piece, in float32 or bfloat16."""
    rounds = gradient.dtype == paddle.bfloat16
    to = library.empty([*gradient.shape[:-1], weight.shape[1]])
    read = as_half(weight) if rounds else weight
    _call("linear_input_gradient", (gradient, read, to), weight, rounds)
    return to


class _Linear(PyLayer):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.half = halves(weight)
        ctx.wanted = [wants_gradient(each) for each in (x, weight, bias)]
        ctx.num_inputs = 2 if bias is None else 3
        ctx.make_x = maker(x)
        keeps_x = wants_gradient(weight) and ctx.make_x is None
        ctx.save_for_backward(weight, *([_as_read(x, weight)] if keeps_x else []))
        return forward(x, weight, bias)

    @staticmethod
    def backward(ctx, y_gradient):
        weight, *kept = ctx.saved_tensor()
        gradient = in_one_piece(y_gradient)
        read = as_half(gradient) if ctx.half else gradient
        gradients: list[paddle.Tensor | None] = [None, None, None]
        if ctx.wanted[0]:
            gradients[0] = input_gradient(read, weight)
        if ctx.wanted[1]:
            weight_gradient = gradients[1] = library.empty(weight.shape)
            x = kept[0] if kept else ctx.make_x()
            x = as_half(x) if ctx.half else x
            _call("linear_weight_gradient", (read, x, weight_gradient), weight, ctx.half)
        if ctx.wanted[2]:
            bias_gradient = gradients[2] = library.empty([weight.shape[0]])
            of_bias, rows = library.function("linear_bias_gradient"), math.prod(gradient.shape[:-1])
            of_bias(library.pointer(gradient), library.pointer(bias_gradient), rows, weight.shape[0])
        return tuple(gradients[: ctx.num_inputs])


def _call(name: str, tensors: tuple[paddle.Tensor | None, ...], weight: paddle.Tensor, rounds: bool) -> None:
    """A function over these tensors (the first of which has the rows), rows, in, out, whether matrices are bfloat16."""
    assert tensors[0] is not None
    rows, (out, in_) = math.prod(tensors[0].shape[:-1]), weight.shape
    addresses = [None if each is None else library.pointer(each) for each in tensors]
    library.function(name)(*addresses, rows, in_, out, rounds)


def readable(parameter: paddle.Tensor) -> paddle.Tensor:
    """The parameter in one piece and in a format that the products read: float32, and bfloat16 where it is a matrix
    that no gradient is made for, on a processor with such products.
    """
    if parameter.dtype == paddle.float32:
        return in_one_piece(parameter)
    wants_no_gradient = parameter.stop_gradient or not paddle.is_grad_enabled()
    is_matrix = parameter.dtype == paddle.bfloat16 and parameter.ndim == 2
    if is_matrix and wants_no_gradient and bf16.unavailable_reason() is None:
        return in_one_piece(parameter)
    return in_one_piece(parameter.astype("float32"))


def _as_read(x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
    return cached_bf16(x) if halves(weight) else x


def in_one_piece(x: paddle.Tensor) -> paddle.Tensor:
    """`x` itself where its values lie row after row, else a copy."""
    return x if x.is_contiguous() else x.contiguous()


def wants_gradient(tensor: paddle.Tensor | None) -> bool:
    """Whether a gradient of the tensor is to be made."""
    return tensor is not None and not tensor.stop_gradient


def linear_reference(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None = None) -> paddle.Tensor:
    """Paddle's matmul; a weight in bfloat16 on the CPU, where that has no kernel, is widened for it."""
    if weight.dtype == paddle.bfloat16 and weight.place.is_cpu_place():
        weight = weight.astype("float32")
    y = paddle.matmul(x, weight, transpose_y=True)
    return y if bias is None else y + bias.astype(y.dtype)


linear_op = DispatchedOp("linear", native=(linear_native, library.usable), reference=linear_reference)


def linear(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None = None) -> paddle.Tensor:
    """Map [..., in] to [..., out].

    Args:
        x: [..., in].
        weight: [out, in]; on the CPU it may be bfloat16 (frozen) beside an x in float32.
        bias: [out].

    Returns:
        [..., out] in the format that the product gives: under autocast half, on the CPU always float32.
    """
    return linear_op.choose(x)(x, weight, bias)
