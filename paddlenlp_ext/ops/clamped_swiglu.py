"""Clamped gate of gpt-oss's experts (OpenAI 2025, arXiv:2508.10925).

g = min(gate, limit)        u = clip(up, -limit, limit)        (u + 1) g sigmoid(alpha g)
"""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from paddlenlp_ext.paddle_compat import is_symbolic


def clamped_swiglu(gate: paddle.Tensor, up: paddle.Tensor, alpha: float, limit: float) -> paddle.Tensor:
    """Compute the gate of two tensors of the same shape; only the inputs are saved."""
    if is_symbolic(gate):
        return _clamped_swiglu(gate, up, alpha, limit)
    return _ClampedSwiGlu.apply(gate, up, alpha, limit)


def _clamped_swiglu(gate: paddle.Tensor, up: paddle.Tensor, alpha: float, limit: float) -> paddle.Tensor:
    g, u = gate.clip(max=limit), up.clip(-limit, limit)
    return F.sigmoid(g * alpha) * g * (u + 1.0)


class _ClampedSwiGlu(PyLayer):
    @staticmethod
    def forward(ctx, gate, up, alpha, limit):
        ctx.save_for_backward(gate, up)
        ctx.alpha, ctx.limit, ctx.needs_grad = alpha, limit, [not x.stop_gradient for x in (gate, up)]
        return _clamped_swiglu(gate, up, alpha, limit)

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
