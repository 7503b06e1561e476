"""A step of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) for many tensors at once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import paddle

from paddlenlp_ext.ops.cpu.library import function, usable
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.gradients import pointers, sizes


class AdamWUpdate(NamedTuple):
    """One tensor's part of a step. All but the gradient is brought up to date.

    Attributes:
        parameter, gradient, moment1, moment2: of one shape.
        beta1_power, beta2_power: [1], the betas to the power of the step that is about to be made.
        rate: learning rate.
        decay: weight decay; the parameter loses `rate * decay` of itself.
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
    """The published formula, one tensor after the other."""
    for parameter, gradient, moment1, moment2, beta1_power, beta2_power, rate, decay in updates:
        moment1.set_value(moment1 * beta1 + gradient * (1 - beta1))
        moment2.set_value(moment2 * beta2 + gradient.square() * (1 - beta2))
        mean, mean_square = moment1 / (1 - beta1_power), moment2 / (1 - beta2_power)
        kept = parameter * (1 - rate * decay)
        parameter.set_value(kept - mean / (mean_square.sqrt() + epsilon) * rate)
        beta1_power.set_value(beta1_power * beta1)
        beta2_power.set_value(beta2_power * beta2)


def adamw_cpp(updates: Sequence[AdamWUpdate], beta1: float, beta2: float, epsilon: float) -> None:
    """The same in one call (csrc/adamw.cpp)."""
    if not updates:
        return
    parameters, gradients, *state, rates, decays = zip(*updates, strict=True)
    gradients = [gradient.contiguous() for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert (parameter.shape, parameter.dtype) == (gradient.shape, gradient.dtype), "a gradient of another tensor"
    tensors = [pointers(column) for column in (parameters, gradients, *state)]
    numbers = [(ctypes.c_float * len(updates))(*column) for column in (rates, decays)]
    run = function("adamw_update")
    run(*tensors, *numbers, sizes(parameters), len(updates), beta1, beta2, epsilon)


adamw_op = DispatchedOp("adamw", native=(adamw_cpp, usable), reference=adamw_reference)
