"""Fused AdamW step for bfloat16 weights; the formula is that of ops/adamw/__init__.py, in float32.

    master copy             the float32 copy is updated, and the weight is the copy rounded to the nearest bfloat16
    stochastic rounding     the weight is widened, updated and rounded stochastically (ops/stochastic_rounding.py)

Rounding to the nearest bfloat16 without a copy would lose most updates: they are smaller than half the distance of two
neighbouring weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import paddle

from paddlenlp_ext.ops.adamw import AdamWUpdate, adamw_reference
from paddlenlp_ext.ops.adamw.triton import adamw_bf16_triton
from paddlenlp_ext.ops.cpu.api import struct
from paddlenlp_ext.ops.cpu.library import function, unavailable_reason
from paddlenlp_ext.ops.dispatch import DispatchedOp, on_cpu
from paddlenlp_ext.ops.gradients import pointers, sizes
from paddlenlp_ext.ops.stochastic_rounding import DrawPosition, stochastic_round
from paddlenlp_ext.ops.triton_launch import on_gpu_with_triton


class Bf16Update(NamedTuple):
    """Update of a bfloat16 weight: either `master` or `position` is set.

    Attributes:
        update: tensors and numbers of the update; the weight is bfloat16, the gradient bfloat16 or float32,
            the others as in `AdamWUpdate`.
        master: float32 copy of the weight.
        position: position of the weight in the draws of stochastic rounding.
    """

    update: AdamWUpdate
    master: paddle.Tensor | None = None
    position: DrawPosition | None = None


def adamw_bf16_reference(updates: Sequence[Bf16Update], beta1: float, beta2: float, epsilon: float) -> None:
    """Update each weight in turn, in plain Paddle."""
    for update, master, position in updates:
        weight = update.parameter
        value = weight.astype("float32") if master is None else master
        wide = update._replace(parameter=value, gradient=update.gradient.astype("float32"))
        adamw_reference([wide], beta1, beta2, epsilon)
        weight.set_value(value.astype(weight.dtype) if position is None else stochastic_round(value, position))


def adamw_bf16_cpp(updates: Sequence[Bf16Update], beta1: float, beta2: float, epsilon: float) -> None:
    """Update all weights in one call for each kind of rounding (csrc/adamw.cpp)."""
    _call([each for each in updates if each.master is not None], beta1, beta2, epsilon)
    _call([each for each in updates if each.master is None], beta1, beta2, epsilon)


def _call(updates: Sequence[Bf16Update], beta1: float, beta2: float, epsilon: float) -> None:
    if not updates:
        return
    columns, masters, positions = zip(*updates, strict=True)
    weights, gradients, *state, rates, decays = zip(*columns, strict=True)
    in_bf16 = all(gradient.dtype == paddle.bfloat16 for gradient in gradients)
    gradients = [gradient.astype("bfloat16" if in_bf16 else "float32").contiguous() for gradient in gradients]
    for weight, gradient in zip(weights, gradients, strict=True):
        assert weight.shape == gradient.shape and weight.dtype == paddle.bfloat16, "gradient does not match its weight"
    copies = None if masters[0] is None else pointers(masters)
    tensors = [pointers(weights), copies, *(pointers(column) for column in (gradients, *state))]
    numbers = [(ctypes.c_float * len(updates))(*column) for column in (rates, decays)]
    draws = None
    if copies is None:
        draws = (struct("DrawPosition") * len(updates))(*(position.as_struct() for position in positions))
    run = function("adamw_update_bf16")
    run(*tensors, *numbers, sizes(weights), len(updates), beta1, beta2, epsilon, draws, in_bf16)


def _usable(weight: paddle.Tensor) -> str | None:
    return on_cpu(weight) or unavailable_reason()


adamw_bf16_op = DispatchedOp(
    "adamw in bfloat16",
    native=(adamw_bf16_cpp, _usable),
    triton=(adamw_bf16_triton, on_gpu_with_triton),
    reference=adamw_bf16_reference,
)
