"""SwiGLU and GeGLU in C++ (csrc/gates.cpp); only the inputs are saved, and `reuse_inputs` has no effect."""

from __future__ import annotations

import math
from typing import Any

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.cpp.bf16 import bf16_matmuls_enabled, set_cached_bf16
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

    Under `bf16_matmuls`, the inputs are rounded to bfloat16. The product is computed from the rounded inputs, and only
    the rounded inputs are saved.
    """
    assert gate.shape == up.shape and gate.dtype == up.dtype, f"{gate.shape} {gate.dtype} and {up.shape} {up.dtype}"
    gate, up = gate.contiguous(), up.contiguous()
    if not needs_grad(gate, up):
        out, _, _, out_half = _forward(gate, up, is_gelu)
    else:
        saved: list[Any] = []
        out = _GateCpp.apply(gate, up, is_gelu, saved)
        gate, up, out_half = saved
        in_bf16 = gate.dtype == paddle.bfloat16
        make_bf16 = (lambda: _product(gate, up, is_gelu, "bfloat16")) if in_bf16 else None
        with_recompute_function(out, lambda: _product(gate, up, is_gelu, "float32"), make_bf16)
    if out_half is not None:
        set_cached_bf16(out, out_half)
    return out


class _GateCpp(PyLayer):
    @staticmethod
    def forward(ctx, gate, up, is_gelu, saved):
        ctx.needs_grad, ctx.is_gelu = [not x.stop_gradient for x in (gate, up)], is_gelu
        out, *rest = _forward(gate, up, is_gelu)
        saved += rest
        ctx.save_for_backward(*rest[:2])
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


def _product(gate: paddle.Tensor, up: paddle.Tensor, is_gelu: bool, dtype: str) -> paddle.Tensor:
    """Return the product in `dtype`; only bfloat16 inputs have a bfloat16 product."""
    out = empty(gate.shape, dtype)
    inputs = pointer(gate), pointer(up), math.prod(gate.shape)
    if dtype == "bfloat16":
        function("gate_forward_bf16")(*inputs, pointer(out), is_gelu)
    else:
        function("gate_forward")(*inputs, pointer(out), is_gelu, gate.dtype == paddle.bfloat16)
    return out


def _forward(
    gate: paddle.Tensor, up: paddle.Tensor, is_gelu: bool
) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor, paddle.Tensor | None]:
    """Return the product in float32, `gate`, `up`, and the product in bfloat16 or None.

    Under `bf16_matmuls`, `gate` and `up` are rounded to bfloat16. Without `bf16_matmuls`, the last value is None.
    """
    if not bf16_matmuls_enabled():
        return _product(gate, up, is_gelu, "float32"), gate.detach(), up.detach(), None
    gate_half, up_half, out_half = (empty(gate.shape, "bfloat16") for _ in range(3))
    out = empty(gate.shape)
    results = map(pointer, (gate_half, up_half, out, out_half))
    function("gate_forward_rounded")(pointer(gate), pointer(up), math.prod(gate.shape), *results, is_gelu)
    return out, gate_half, up_half, out_half
