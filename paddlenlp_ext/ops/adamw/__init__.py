"""Fused AdamW step for many tensors (Loshchilov and Hutter 2019, arXiv:1711.05101).

With learning rate r, weight decay d, step t and gradient g:

    m = b1 m + (1 - b1) g
    v = b2 v + (1 - b2) g^2
    w = (1 - r d) w - r (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon)
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import paddle

from paddlenlp_ext.ops.adamw.triton import adamw_triton
from paddlenlp_ext.ops.cpu.library import function, usable
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.gradients import pointers, sizes
from paddlenlp_ext.ops.triton_launch import on_gpu_with_triton


class AdamWUpdate(NamedTuple):
    """Tensors and numbers of one parameter's update; everything except the gradient is updated in place.

    Attributes:
        parameter, gradient, moment1, moment2: tensors of the same shape.
        beta1_power, beta2_power: [1], b1^t and b2^t for the step t of this update.
        rate: learning rate.
        decay: weight decay; the parameter shrinks by the factor `1 - rate * decay`.
    """

    parameter: paddle.Tensor
    gradient: paddle.Tensor
    moment1: paddle.Tensor
    moment2: paddle.Tensor
    beta1_power: paddle.Tensor
    beta2_power: paddle.Tensor
    rate: float
    decay: float


def adamw_reference(updates: Sequence[AdamWUpdate], beta1: float, beta2: float, epsilon: float) -> None:
    """Apply the formula to each tensor in turn, in plain Paddle."""
    for parameter, gradient, moment1, moment2, beta1_power, beta2_power, rate, decay in updates:
        moment1.set_value(moment1 * beta1 + gradient * (1 - beta1))
        moment2.set_value(moment2 * beta2 + gradient.square() * (1 - beta2))
        mean, mean_square = moment1 / (1 - beta1_power), moment2 / (1 - beta2_power)
        decayed = parameter * (1 - rate * decay)
        parameter.set_value(decayed - mean / (mean_square.sqrt() + epsilon) * rate)
        beta1_power.set_value(beta1_power * beta1)
        beta2_power.set_value(beta2_power * beta2)


def adamw_cpp(updates: Sequence[AdamWUpdate], beta1: float, beta2: float, epsilon: float) -> None:
    """Update all tensors in one call (csrc/adamw.cpp)."""
    if not updates:
        return
    parameters, gradients, *state, rates, decays = zip(*updates, strict=True)
    gradients = [gradient.contiguous() for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert (parameter.shape, parameter.dtype) == (gradient.shape, gradient.dtype), (
            "gradient does not match its parameter"
        )
    tensors = [pointers(column) for column in (parameters, gradients, *state)]
    numbers = [(ctypes.c_float * len(updates))(*column) for column in (rates, decays)]
    run = function("adamw_update")
    run(*tensors, *numbers, sizes(parameters), len(updates), beta1, beta2, epsilon)


adamw_op = DispatchedOp(
    "adamw", native=(adamw_cpp, usable), triton=(adamw_triton, on_gpu_with_triton), reference=adamw_reference
)
