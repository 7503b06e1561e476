"""SwiGLU gate of a feed-forward layer, `silu(gate) * up` (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.cpu.library import usable
from paddlenlp_ext.ops.dispatch import DispatchedOp, on_cpu_in_fp32
from paddlenlp_ext.ops.gates import gate_cpp


def swiglu_reference(gate: paddle.Tensor, up: paddle.Tensor) -> paddle.Tensor:
    """Compute `silu(gate) * up`, elementwise."""
    return F.silu(gate) * up


def swiglu_cpu(gate: paddle.Tensor, up: paddle.Tensor) -> paddle.Tensor:
    """Compute the sigmoid by tanh, the fastest exponential of Paddle's CPU kernels; only the inputs are saved."""
    return _SwiGlu.apply(gate, up)


def _sigmoid(x: paddle.Tensor) -> paddle.Tensor:
    return (x * 0.5).tanh_().scale_(0.5, bias=0.5)


class _SwiGlu(PyLayer):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return _sigmoid(gate).multiply_(gate).multiply_(up)

    @staticmethod
    def backward(ctx, gradient):
        gate, up = ctx.saved_tensor()
        sigmoid = _sigmoid(gate)
        silu = gate * sigmoid
        up_gradient = None if up.stop_gradient else silu * gradient  # Paddle rejects gradients of frozen inputs
        if gate.stop_gradient:
            return None, up_gradient
        # silu' = sigmoid + silu - sigmoid * silu
        slope = sigmoid.subtract_(sigmoid * silu).add_(silu)
        return slope.multiply_(up).multiply_(gradient), up_gradient


def swiglu_cpp(gate: paddle.Tensor, up: paddle.Tensor) -> paddle.Tensor:
    """Compute the gate in one pass of C++ (gates.py)."""
    return gate_cpp(gate, up, is_gelu=False)


swiglu_op = DispatchedOp(
    "swiglu", native=(swiglu_cpp, usable), cpu=(swiglu_cpu, on_cpu_in_fp32), reference=swiglu_reference
)


def swiglu(gate: paddle.Tensor, up: paddle.Tensor) -> paddle.Tensor:
    """Return `silu(gate) * up` for two tensors of the same shape."""
    return swiglu_op.choose(gate)(gate, up)
