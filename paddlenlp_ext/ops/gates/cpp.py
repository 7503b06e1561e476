"""SwiGLU and GeGLU in C++ (csrc/gates.cpp); only the inputs are saved, and `reuse_inputs` has no effect."""

from __future__ import annotations

import math

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.cpp.bf16 import bf16_matmuls_enabled
from paddlenlp_ext.ops.cpp.library import empty, function, pointer
from paddlenlp_ext.ops.recompute_functions import with_recompute_function
from paddlenlp_ext.ops.tensor_utils import needs_grad


def swiglu_cpp(gate: paddle.Tensor, up: paddle.Tensor, reuse_inputs: bool = False) -> paddle.Tensor:
    """Compute SwiGLU in one pass of C++."""
    return _gate_cpp(gate, up, is_gelu=False)


def geglu_cpp(gate: paddle.Tensor, up: paddle.Tensor, reuse_inputs: bool = False) -> paddle.Tensor:
    """Compute GeGLU in one pass of C++."""
    return _gate_cpp(gate, up, is_gelu=True)


def _gate_cpp(gate: paddle.Tensor, up: paddle.Tensor, *, is_gelu: bool) -> paddle.Tensor:
    """Compute SwiGLU or GeGLU in one pass, and attach a recompute function to the product.

    Under `bf16_matmuls` the inputs are rounded to bfloat16, and the product is computed from the rounded inputs, which
    are saved.
    """
    assert gate.shape == up.shape and gate.dtype == up.dtype, f"{gate.shape} {gate.dtype} and {up.shape} {up.dtype}"
    gate, up = gate.contiguous(), up.contiguous()
    if not needs_grad(gate, up):
        return _forward(gate, up, is_gelu)[0]
    saved: list[paddle.Tensor] = []
    return with_recompute_function(
        _GateCpp.apply(gate, up, is_gelu, saved), lambda: _product(saved[0], saved[1], is_gelu)
    )


class _GateCpp(PyLayer):
    @staticmethod
    def forward(ctx, gate, up, is_gelu, saved):
        ctx.needs_grad, ctx.is_gelu = [not x.stop_gradient for x in (gate, up)], is_gelu
        out, *inputs = _forward(gate, up, is_gelu)
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
        run = function("gate_backward")
        run(*inputs, math.prod(gate.shape), *addresses, ctx.is_gelu, gate.dtype == paddle.bfloat16)
        return tuple(gradients)


def _product(gate: paddle.Tensor, up: paddle.Tensor, is_gelu: bool) -> paddle.Tensor:
    out = empty(gate.shape)
    inputs = pointer(gate), pointer(up), math.prod(gate.shape)
    function("gate_forward")(*inputs, pointer(out), is_gelu, gate.dtype == paddle.bfloat16)
    return out


def _forward(
    gate: paddle.Tensor, up: paddle.Tensor, is_gelu: bool
) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    """Return the product, and `gate` and `up`, which are rounded to bfloat16 under `bf16_matmuls`."""
    if not bf16_matmuls_enabled():
        return _product(gate, up, is_gelu), gate.detach(), up.detach()
    gate_half, up_half, out = empty(gate.shape, "bfloat16"), empty(up.shape, "bfloat16"), empty(gate.shape)
    results = pointer(gate_half), pointer(up_half), pointer(out)
    function("gate_forward_rounded")(pointer(gate), pointer(up), math.prod(gate.shape), *results, is_gelu)
    return out, gate_half, up_half
