"""Triton kernels of gated activations (SwiGLU, GeGLU, clamped); independent of Paddle and PyTorch.

    out = a(gate) v(up)        d gate = d out v(up) a'(gate)        d up = d out a(gate) v'(up)

    a(g) = g sigmoid(z(g))     a'(g) = sigmoid(z) + a(g) (1 - sigmoid(z)) z'(g)

    ACTIVATION    z(g)                                          v(u)
    "silu"        g                                             u
    "gelu"        2 sqrt(2 / pi) (g + 0.044715 g^3)             u      1/2 (1 + tanh(y)) = sigmoid(2 y)
    "clamped"     alpha g, with g limited from above            1 + u, with u limited on both sides

Arithmetic is float32. Rows may be evenly spaced slices of longer rows, such as the halves of a fused gate-up
projection. The gradients may overwrite gate and up, because a program writes only the elements that it has read.

Tested in Triton's interpreter (tests/ops/gates/test_triton.py).

Names: R rows, F features of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from paddlenlp_ext.ops.triton_utils.tile_sizes import TileSizes, fills_threads, shrunk

# Tile sizes for long rows. For shorter rows, `shrunk` reduces COLUMNS and the number of warps.
FORWARD_SIZES, BACKWARD_SIZES = (
    TileSizes(name, (), fills_threads("COLUMNS"), COLUMNS=(1024, 2048, 4096, 8192), num_warps=(4, 8, 16))
    for name in ("gate_forward", "gate_backward")
)


class Rows(NamedTuple):
    """Paddle or PyTorch tensor [..., F] whose rows are contiguous and `stride` elements apart."""

    tensor: Any
    stride: int


@triton.jit
def _activation(g, u, alpha, limit, ACTIVATION: tl.constexpr):
    """Return a(g), a'(g), v(u) and v'(u)."""
    v, v_slope = u, tl.full(u.shape, 1.0, tl.float32)
    is_free = g <= limit  # used only for the clamped gate
    if ACTIVATION == "silu":
        z, z_slope = g, tl.full(g.shape, 1.0, tl.float32)
    elif ACTIVATION == "gelu":
        SCALE: tl.constexpr = 1.5957691216057308  # 2 sqrt(2 / pi)
        near = tl.minimum(tl.maximum(g, -16.0), 16.0)  # the cube stays finite; beyond +-16 the sigmoid is 0 or 1
        z = SCALE * near * (1.0 + 0.044715 * near * near)
        z_slope = SCALE * (1.0 + 0.134145 * near * near)
    else:
        g = tl.minimum(g, limit)
        z, z_slope = alpha * g, tl.full(g.shape, 1.0, tl.float32) * alpha
        v = 1.0 + tl.minimum(tl.maximum(u, -limit), limit)
        v_slope = tl.where(tl.abs(u) <= limit, 1.0, 0.0)
    sigmoid = 1.0 / (1.0 + tl.exp(-z))
    a = g * sigmoid
    slope = sigmoid + a * (1.0 - sigmoid) * z_slope
    if ACTIVATION == "clamped":
        slope = tl.where(is_free, slope, 0.0)
    return a, slope, v, v_slope


@triton.jit
def gate_forward_kernel(
    gate,  # [R, F]
    up,  # [R, F]
    out,  # [R, F]
    size,  # F
    gate_stride,  # row strides, in elements
    up_stride,
    out_stride,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute COLUMNS outputs of one row."""
    r = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = f < size
    g = tl.load(gate + r * gate_stride + f, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + r * up_stride + f, mask=inside, other=0.0).to(tl.float32)
    a, _, v, _ = _activation(g, u, alpha, limit, ACTIVATION)
    tl.store(out + r * out_stride + f, (a * v).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_backward_kernel(
    gradient,  # [R, F]
    gate,  # [R, F]
    up,  # [R, F]
    gate_gradient,  # [R, F]; may be `gate`
    up_gradient,  # [R, F]; may be `up`
    size,  # F
    gradient_stride,  # row strides, in elements
    gate_stride,
    up_stride,
    gate_gradient_stride,
    up_gradient_stride,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the gradients of COLUMNS elements of one row."""
    r = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = f < size
    d = tl.load(gradient + r * gradient_stride + f, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + r * gate_stride + f, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + r * up_stride + f, mask=inside, other=0.0).to(tl.float32)
    a, a_slope, v, v_slope = _activation(g, u, alpha, limit, ACTIVATION)
    dtype = gate_gradient.dtype.element_ty
    tl.store(gate_gradient + r * gate_gradient_stride + f, (d * v * a_slope).to(dtype), mask=inside)
    tl.store(up_gradient + r * up_gradient_stride + f, (d * a * v_slope).to(dtype), mask=inside)


def launch_forward(
    launch: Callable[..., None],
    gate: Rows,
    up: Rows,
    out: Rows,
    activation: str,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> None:
    """Launch the forward pass.

    Args:
        launch: function that takes a kernel, its grid, its arguments and its constants.
        gate: input of the activation, [..., F].
        up: factor of the activation, [..., F].
        out: product [..., F]; written.
        activation: "silu", "gelu" or "clamped".
        alpha, limit: parameters of the clamped gate.
    """
    _launch(launch, gate_forward_kernel, FORWARD_SIZES, (gate, up, out), activation, alpha, limit)


def launch_backward(
    launch: Callable[..., None],
    gradient: Rows,
    gate: Rows,
    up: Rows,
    gate_gradient: Rows,
    up_gradient: Rows,
    activation: str,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> None:
    """Launch the backward pass; the other arguments are described in `launch_forward`.

    Args:
        gradient: gradient of the product, [..., F].
        gate_gradient, up_gradient: gradients of `gate` and `up`; written. The tensors may be `gate` and `up`.
    """
    matrices = gradient, gate, up, gate_gradient, up_gradient
    _launch(launch, gate_backward_kernel, BACKWARD_SIZES, matrices, activation, alpha, limit)


def _launch(
    launch: Callable[..., None],
    kernel: Any,
    table: TileSizes,
    matrices: tuple[Rows, ...],
    activation: str,
    alpha: float,
    limit: float,
) -> None:
    *leading, size = matrices[0].tensor.shape
    sizes = shrunk(table(matrices[0].tensor), "COLUMNS", size)
    tensors, strides = zip(*matrices, strict=True)
    grid, numbers = (math.prod(leading), triton.cdiv(size, sizes["COLUMNS"])), (float(alpha), float(limit))
    launch(kernel, grid, *tensors, size, *strides, *numbers, ACTIVATION=activation, **sizes)
