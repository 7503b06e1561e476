"""LoRA linear layer on a GPU: one launch for few positions, otherwise kernels around Paddle's large matmuls.

    forward        one launch: y = base(x) + s u B^T and u = x A^T;   otherwise y = base(x);   u = x A^T;   y += s u B^T
    backward       v = s dy B and dB = s dy^T u;   dx = dy W;   dx += v A;   dA = v^T x

For few positions, reading W takes most of the time. The one-pass kernel reads W once, dequantizes W in registers and
multiplies each tile of x by W and A. For quantized weights without a Paddle kernel, the one-pass kernel replaces a
launch (or a dequantized copy of W) and four operators. For other weights, the kernel would replace only operators,
which take less Python time than the launch. For many positions, the one-pass kernel would be slower: each program
recomputes u for its columns of y, and for 128 columns and rank 16, this adds an eighth to the multiplications.
docs/internals/triton.md estimates the times ("LoRA in one launch").

For many positions, rank 16 adds less than 1 % to the multiplications of a 4096 x 4096 layer, but each pass over y, dy
or dx takes a few percent of the time of the large matmul. cuBLAS computes the large matmul faster than a Triton kernel
with the update in the epilogue. The kernels beside Paddle's matmuls therefore save passes over memory:

    pass                          Paddle's matmuls             kernels
    y + s u B^T, dx + v A         product, then sum            in place: one read and one write
    dy for v and dB               two reads                    one read, up to a rank of 32

At a higher rank, writing the partial sums of the gradient kernel would take longer than a second read of dy.

Layers with the same input x (q, k, v; gate, up) are launched separately. For few positions, x stays in the L2 cache.
For many positions, a joint matmul of x with all A matrices would save one pass over x per additional layer: 4 % of the
time of a 4096 x 4096 layer. A joint matmul would require a single op and autograd node for modules with separate hooks,
shards and adapters.

Tested in Triton's interpreter on the CPU (tests/ops/lora_linear/test_triton.py), except for the launch itself.
Not yet run on a GPU with Paddle.

Shapes: T positions, I inputs, O outputs, K rank.
"""

from __future__ import annotations

import math
from typing import Any

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.frozen_linear import FrozenLinear
from paddlenlp_ext.ops.lora_linear.reference import lora_linear_reference
from paddlenlp_ext.ops.recompute_functions import recompute_function
from paddlenlp_ext.ops.tensor_utils import contiguous, in_dtype, requires_grad
from paddlenlp_ext.ops.triton_utils.launch import empty_beside, launch

MOST_POSITIONS, MOST_POSITIONS_OF_PADDLE = 64, 0
"""Largest number of positions for the one-pass kernel: for weights that Paddle cannot multiply as stored, and for all
other weights. The limits were not measured on a GPU (benchmarks/triton_cases_decoding.py)."""
LARGEST_SHARED_RANK = 32
"""Largest rank for the gradient kernel. Up to this rank, the partial sums of the kernel are smaller than dy."""
SMALLEST_BATCH = 64
"""For fewer positions than this number, plain Paddle is faster than Paddle's matmuls followed by the kernels."""


def lora_linear_triton(
    x: paddle.Tensor, base: FrozenLinear, a: paddle.Tensor, b: paddle.Tensor, scaling: float
) -> paddle.Tensor:
    """Compute `lora_linear` with Triton kernels; use the reference for few positions without one-pass support."""
    if math.prod(x.shape[:-1]) < SMALLEST_BATCH and not supports_one_pass(x, base, a):
        return lora_linear_reference(x, base, a, b, scaling)
    if paddle.is_grad_enabled() and any(requires_grad(each) for each in (x, a, b)):
        return _LoRALinear.apply(x, a, b, base, scaling)
    return _forward(x, base, a, b, scaling)[0]


class _LoRALinear(PyLayer):
    @staticmethod
    def forward(ctx, x, a, b, base, scaling):
        y, inner_TK = _forward(x, base, a, b, scaling)
        ctx.base, ctx.scaling, ctx.shape, ctx.dtypes = base, scaling, x.shape, [each.dtype for each in (x, a, b)]
        ctx.grads_needed = [requires_grad(each) for each in (x, a, b)]
        ctx.recompute_x = recompute_function(x)
        saves_x = ctx.grads_needed[1] and ctx.recompute_x is None
        ctx.save_for_backward(a, b, inner_TK, *([x] if saves_x else []))
        return y

    @staticmethod
    def backward(ctx, y_gradient):
        a, b, inner_TK, *saved = ctx.saved_tensor()
        of_x, of_a, of_b = ctx.grads_needed
        gradient_TO = contiguous(y_gradient.reshape([-1, y_gradient.shape[-1]]))
        dtype, gradients = gradient_TO.dtype, dict[str, Any](x=None, a=None, b=None)
        v_TK, b_gradient = low_rank_gradients(gradient_TO, in_dtype(inner_TK, dtype), in_dtype(b, dtype))
        v_TK = in_dtype(v_TK.scale_(ctx.scaling), dtype)
        if of_b:
            gradients["b"] = b_gradient.scale_(ctx.scaling)
        if of_a:
            x = saved[0] if saved else ctx.recompute_x()
            gradients["a"] = paddle.matmul(v_TK, in_dtype(x.reshape([-1, a.shape[1]]), dtype), transpose_x=True)
        if of_x:
            x_gradient = contiguous(in_dtype(ctx.base.input_gradient(gradient_TO), dtype))
            add_low_rank_(x_gradient, v_TK, in_dtype(a, dtype), 1.0, (a.shape[1], 1))
            gradients["x"] = x_gradient.reshape(ctx.shape)
        pairs = zip(gradients.values(), ctx.dtypes, strict=True)
        return tuple(None if each is None else in_dtype(each, dtype) for each, dtype in pairs)


def _forward(
    x: paddle.Tensor, base: FrozenLinear, a: paddle.Tensor, b: paddle.Tensor, scaling: float
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return y and u = x A^T [T, K], both in the dtype of the base layer's outputs."""
    if supports_one_pass(x, base, a):
        return one_pass(x, base, a, b, scaling)
    y, (rank, in_) = contiguous(base(x)), a.shape
    inner_TK = paddle.matmul(in_dtype(x.reshape([-1, in_]), y.dtype), in_dtype(a, y.dtype), transpose_y=True)
    add_low_rank_(y, in_dtype(inner_TK, y.dtype), in_dtype(b, y.dtype), scaling, (1, rank))
    return y, inner_TK


def supports_one_pass(x: paddle.Tensor, base: FrozenLinear, a: paddle.Tensor) -> bool:
    """Return whether the one-pass kernel supports these positions, weights and rank; autocast must be disabled."""
    most = MOST_POSITIONS_OF_PADDLE if base.has_paddle_product(x) else MOST_POSITIONS
    if not 0 < math.prod(x.shape[:-1]) <= most or paddle.is_autocast_enabled():
        return False
    from paddlenlp_ext.ops.lora_linear.kernels import LARGEST_RANK

    return a.shape[0] <= LARGEST_RANK and base.fits_tiles(x.dtype)


def one_pass(
    x: paddle.Tensor, base: FrozenLinear, a: paddle.Tensor, b: paddle.Tensor, scaling: float
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return y and u = x A^T [T, K] in the dtype of x, from one launch; requires `supports_one_pass`."""
    from paddlenlp_ext.ops.lora_linear.kernels import launch_lora_linear

    x, a, b = contiguous(x), contiguous(a), contiguous(b)
    y, inner_TK = (
        empty_beside(x, shape) for shape in ([*x.shape[:-1], b.shape[0]], [math.prod(x.shape[:-1]), a.shape[0]])
    )
    launch_lora_linear(launch, x, base.tile_layer(y), base.tile_format(), a, b, scaling, inner_TK)
    return y, inner_TK


def add_low_rank_(
    y: paddle.Tensor, inner_TK: paddle.Tensor, factor: paddle.Tensor, scaling: float, strides: tuple[int, int]
) -> None:
    """Add `s u F` to y [..., O] in place; `strides` are the strides of the contiguous `factor` (F) along K and O."""
    from paddlenlp_ext.ops.lora_linear.kernels import launch_add_low_rank

    assert y.is_contiguous(), "the outputs of the matmul must be contiguous"
    launch_add_low_rank(launch, y, contiguous(inner_TK), contiguous(factor), scaling, strides)


def low_rank_gradients(
    gradient_TO: paddle.Tensor, inner_TK: paddle.Tensor, b_OK: paddle.Tensor
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return dy B [T, K] and dy^T u [O, K], in float32."""
    if b_OK.shape[1] > LARGEST_SHARED_RANK:
        gradients = paddle.matmul(gradient_TO, b_OK), paddle.matmul(gradient_TO, inner_TK, transpose_x=True)
        return gradients[0].astype("float32"), gradients[1].astype("float32")
    from paddlenlp_ext.ops.lora_linear.kernels import launch_low_rank_gradients

    def empty(shape: list[int]) -> paddle.Tensor:
        return paddle.empty(shape, "float32", device=gradient_TO.place)

    parts = launch_low_rank_gradients(launch, empty, gradient_TO, contiguous(inner_TK), contiguous(b_OK))
    return parts[0].sum(axis=0), parts[1].sum(axis=0)
