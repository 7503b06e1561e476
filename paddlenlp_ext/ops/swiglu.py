"""SwiGLU gate of a feed-forward layer, `silu(gate) * up` (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import math

import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.cpu.bf16 import bf16_matmuls_enabled
from paddlenlp_ext.ops.cpu.library import empty, function, needs_grad, pointer, usable
from paddlenlp_ext.ops.dispatch import DispatchedOp, on_cpu_in_fp32
from paddlenlp_ext.ops.saved_tensors import with_recompute_function


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
    """Compute the gate in one pass of C++ (csrc/swiglu.cpp).

    Only the inputs are saved, and consumers can recompute the product from them. Under `bf16_matmuls` the inputs are
    rounded to bfloat16 first: the rounded inputs are saved, and the product is computed from them.
    """
    assert gate.shape == up.shape and gate.dtype == up.dtype, f"{gate.shape} {gate.dtype} and {up.shape} {up.dtype}"
    gate, up = gate.contiguous(), up.contiguous()
    if not needs_grad(gate, up):
        return _forward(gate, up)[0]
    saved: list[paddle.Tensor] = []
    return with_recompute_function(_SwiGluCpp.apply(gate, up, saved), lambda: _product(*saved))


class _SwiGluCpp(PyLayer):
    @staticmethod
    def forward(ctx, gate, up, saved):
        ctx.needs_grad = [not x.stop_gradient for x in (gate, up)]
        out, *inputs = _forward(gate, up)
        saved += inputs
        ctx.save_for_backward(*inputs)
        return out

    @staticmethod
    def backward(ctx, gradient):
        gate, up = ctx.saved_tensor()
        gradient = gradient.contiguous()
        gradients = [empty(gate.shape) if needed else None for needed in ctx.needs_grad]
        addresses = [None if x is None else pointer(x) for x in gradients]
        inputs = pointer(gradient), pointer(gate), pointer(up)
        run = function("swiglu_backward")
        run(*inputs, math.prod(gate.shape), *addresses, gate.dtype == paddle.bfloat16)
        return tuple(gradients)


def _product(gate: paddle.Tensor, up: paddle.Tensor) -> paddle.Tensor:
    out = empty(gate.shape)
    inputs = pointer(gate), pointer(up), math.prod(gate.shape)
    function("swiglu_forward")(*inputs, pointer(out), gate.dtype == paddle.bfloat16)
    return out


def _forward(gate: paddle.Tensor, up: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    """Return the product, and the `gate` and `up` from which it was computed."""
    if not bf16_matmuls_enabled():
        return _product(gate, up), gate.detach(), up.detach()
    gate_half, up_half, out = empty(gate.shape, "bfloat16"), empty(up.shape, "bfloat16"), empty(gate.shape)
    results = pointer(gate_half), pointer(up_half), pointer(out)
    function("swiglu_forward_rounded")(pointer(gate), pointer(up), math.prod(gate.shape), *results)
    return out, gate_half, up_half


swiglu_op = DispatchedOp(
    "swiglu", native=(swiglu_cpp, usable), cpu=(swiglu_cpu, on_cpu_in_fp32), reference=swiglu_reference
)


def swiglu(gate: paddle.Tensor, up: paddle.Tensor) -> paddle.Tensor:
    """Return `silu(gate) * up` for two tensors of the same shape."""
    return swiglu_op.choose(gate)(gate, up)
