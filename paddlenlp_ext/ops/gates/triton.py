"""Gated activations with Triton kernels, in one launch for the forward pass and one for the backward pass.

The backward pass needs only the inputs. The product has a recompute function (ops/recompute_functions.py). With
`reuse_inputs`, the gradients overwrite the inputs, so the backward pass does not allocate two new tensors.

Tested in Triton's interpreter on the CPU (tests/ops/gates/test_triton.py), except for the launch itself.
Not yet run on a GPU with Paddle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.recompute_functions import with_recompute_function
from paddlenlp_ext.ops.tensor_utils import needs_grad
from paddlenlp_ext.ops.triton_utils.launch import empty_beside, evenly_spaced_rows, launch

if TYPE_CHECKING:
    from paddlenlp_ext.ops.gates.kernels import Rows


class _Activation(NamedTuple):
    """Name and parameters of a gate's activation, in the argument order of the launch functions."""

    name: str
    alpha: float = 0.0
    limit: float = 0.0


def swiglu_triton(gate: paddle.Tensor, up: paddle.Tensor, reuse_inputs: bool = False) -> paddle.Tensor:
    """Compute SwiGLU in one launch."""
    return _gate(gate, up, _Activation("silu"), reuse_inputs)


def geglu_triton(gate: paddle.Tensor, up: paddle.Tensor, reuse_inputs: bool = False) -> paddle.Tensor:
    """Compute GeGLU in one launch."""
    return _gate(gate, up, _Activation("gelu"), reuse_inputs)


def clamped_swiglu_triton(
    gate: paddle.Tensor, up: paddle.Tensor, alpha: float, limit: float, reuse_inputs: bool = False
) -> paddle.Tensor:
    """Compute the clamped SwiGLU in one launch."""
    return _gate(gate, up, _Activation("clamped", alpha, limit), reuse_inputs)


def _gate(gate: paddle.Tensor, up: paddle.Tensor, activation: _Activation, reuse_inputs: bool) -> paddle.Tensor:
    assert gate.shape == up.shape and gate.dtype == up.dtype, f"{gate.shape} {gate.dtype} and {up.shape} {up.dtype}"
    if not needs_grad(gate, up):
        return _product(gate, up, activation)
    saved = gate.detach(), up.detach()
    out = _Gate.apply(gate, up, activation, reuse_inputs)
    return with_recompute_function(out, lambda: _product(*saved, activation))


class _Gate(PyLayer):
    @staticmethod
    def forward(ctx, gate, up, activation, reuse_inputs):
        ctx.save_for_backward(gate.detach(), up.detach())
        ctx.activation, ctx.reuse_inputs, ctx.is_used = activation, reuse_inputs, False
        ctx.grads_needed = [not each.stop_gradient for each in (gate, up)]
        return _product(gate, up, activation)

    @staticmethod
    def backward(ctx, gradient):
        from paddlenlp_ext.ops.gates.kernels import launch_backward

        if ctx.reuse_inputs and ctx.is_used:
            raise ValueError(
                "second backward pass through a gate, but the first backward pass has overwritten the gate's inputs; "
                "repeat the forward pass, or call the gate without reuse_inputs"
            )
        ctx.is_used = True
        gate, up = to_gate, to_up = [_rows(each) for each in ctx.saved_tensor()]
        if not ctx.reuse_inputs:
            to_gate, to_up = _rows(empty_beside(gate.tensor)), _rows(empty_beside(up.tensor))
        launch_backward(launch, _rows(gradient), gate, up, to_gate, to_up, *ctx.activation)
        of_gate, of_up = ctx.grads_needed  # Paddle rejects gradients for frozen inputs
        return to_gate.tensor if of_gate else None, to_up.tensor if of_up else None


def _product(gate: paddle.Tensor, up: paddle.Tensor, activation: _Activation) -> paddle.Tensor:
    from paddlenlp_ext.ops.gates.kernels import launch_forward

    out = empty_beside(gate)
    launch_forward(launch, _rows(gate), _rows(up), _rows(out), *activation)
    return out


def _rows(x: paddle.Tensor) -> Rows:
    from paddlenlp_ext.ops.gates.kernels import Rows

    return Rows(*evenly_spaced_rows(x))
