"""Gated activations in plain Paddle.

The `*_recomputed` functions save only the inputs for the backward pass.
"""

from __future__ import annotations

import math

import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

_CUBIC = 0.044715
_SCALE = math.sqrt(2.0 / math.pi)


def swiglu_reference(gate: paddle.Tensor, up: paddle.Tensor, reuse_inputs: bool = False) -> paddle.Tensor:
    """Compute SwiGLU, `silu(gate) * up`."""
    return F.silu(gate) * up


def geglu_reference(gate: paddle.Tensor, up: paddle.Tensor, reuse_inputs: bool = False) -> paddle.Tensor:
    """Compute GeGLU, `gelu(gate) * up`."""
    return F.gelu(gate, approximate=True) * up


def clamped_swiglu_reference(
    gate: paddle.Tensor, up: paddle.Tensor, alpha: float, limit: float, reuse_inputs: bool = False
) -> paddle.Tensor:
    """Compute the clamped SwiGLU of gpt-oss."""
    g, u = gate.clip(max=limit), up.clip(-limit, limit)
    return F.sigmoid(g * alpha) * g * (u + 1.0)


def geglu_recomputed(gate: paddle.Tensor, up: paddle.Tensor, reuse_inputs: bool = False) -> paddle.Tensor:
    """Compute GeGLU; save only the inputs for the backward pass."""
    return _GeGlu.apply(gate, up)


def clamped_swiglu_recomputed(
    gate: paddle.Tensor, up: paddle.Tensor, alpha: float, limit: float, reuse_inputs: bool = False
) -> paddle.Tensor:
    """Compute the clamped SwiGLU; save only the inputs for the backward pass."""
    return _ClampedSwiGlu.apply(gate, up, alpha, limit)


class _GeGlu(PyLayer):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.gelu(gate, approximate=True) * up

    @staticmethod
    def backward(ctx, gradient):
        gate, up = ctx.saved_tensor()
        tanh = ((gate * gate * _CUBIC + 1.0) * gate * _SCALE).tanh()
        half = (tanh + 1.0) * 0.5  # gelu(gate) / gate
        up_gradient = None if up.stop_gradient else half * gate * gradient  # Paddle rejects gradients for frozen inputs
        if gate.stop_gradient:
            return None, up_gradient
        slope = half + (1.0 - tanh * tanh) * gate * 0.5 * _SCALE * (gate * gate * (3.0 * _CUBIC) + 1.0)
        return slope * up * gradient, up_gradient


class _ClampedSwiGlu(PyLayer):
    @staticmethod
    def forward(ctx, gate, up, alpha, limit):
        ctx.save_for_backward(gate, up)
        ctx.alpha, ctx.limit, ctx.needs_grad = alpha, limit, [not x.stop_gradient for x in (gate, up)]
        return clamped_swiglu_reference(gate, up, alpha, limit)

    @staticmethod
    def backward(ctx, gradient):
        gate, up = ctx.saved_tensor()
        g, u = gate.clip(max=ctx.limit), up.clip(-ctx.limit, ctx.limit)
        s = F.sigmoid(g * ctx.alpha)
        gate_gradient = up_gradient = None
        if ctx.needs_grad[0]:
            slope = s * (1.0 + ctx.alpha * g * (1.0 - s))
            gate_gradient = gradient * (u + 1.0) * slope * (gate <= ctx.limit).astype(gate.dtype)
        if ctx.needs_grad[1]:
            up_gradient = gradient * g * s * (up.abs() <= ctx.limit).astype(up.dtype)
        return gate_gradient, up_gradient
