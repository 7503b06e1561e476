"""GeGLU gate of a feed-forward layer, `gelu(gate) * up` with the tanh approximation of GELU.

Sources: the gate arXiv:2002.05202; GELU and its approximation arXiv:1606.08415.

    gelu(x) = x / 2 (1 + tanh(u)),    u = sqrt(2 / pi) (x + 0.044715 x^3)
"""

from __future__ import annotations

import math

import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.cpu.library import usable
from paddlenlp_ext.ops.dispatch import DispatchedOp, anywhere
from paddlenlp_ext.ops.gates import gate_cpp

_CUBIC = 0.044715
_SCALE = math.sqrt(2.0 / math.pi)


def geglu_reference(gate: paddle.Tensor, up: paddle.Tensor) -> paddle.Tensor:
    """Compute `gelu(gate) * up`, elementwise."""
    return F.gelu(gate, approximate=True) * up


def geglu_cpp(gate: paddle.Tensor, up: paddle.Tensor) -> paddle.Tensor:
    """Compute the gate in one pass of C++ (gates.py)."""
    return gate_cpp(gate, up, is_gelu=True)


def geglu_recomputed(gate: paddle.Tensor, up: paddle.Tensor) -> paddle.Tensor:
    """Compute the gate in plain Paddle; only the inputs are saved."""
    return _GeGlu.apply(gate, up)


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
        up_gradient = None if up.stop_gradient else half * gate * gradient  # Paddle rejects gradients of frozen inputs
        if gate.stop_gradient:
            return None, up_gradient
        slope = half + (1.0 - tanh * tanh) * gate * 0.5 * _SCALE * (gate * gate * (3.0 * _CUBIC) + 1.0)
        return slope * up * gradient, up_gradient


geglu_op = DispatchedOp(
    "geglu", native=(geglu_cpp, usable), recomputed=(geglu_recomputed, anywhere), reference=geglu_reference
)


def geglu(gate: paddle.Tensor, up: paddle.Tensor) -> paddle.Tensor:
    """Return `gelu(gate) * up` for two tensors of the same shape."""
    return geglu_op.choose(gate)(gate, up)
