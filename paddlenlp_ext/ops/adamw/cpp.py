"""AdamW steps in C++ (csrc/adamw.cpp, csrc/adamw_8bit.cpp)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import numpy as np
import paddle

from paddlenlp_ext.ops.adamw.quantizer_8bit import search_table
from paddlenlp_ext.ops.adamw.reference import update_in_fp32
from paddlenlp_ext.ops.adamw.updates import BLOCK, AdamStep, AdamW8BitUpdate, AdamWUpdate, Bf16Update, Moments8Bit
from paddlenlp_ext.ops.cpp.api_header import struct
from paddlenlp_ext.ops.cpp.library import function, pointer, pointers, sizes, unavailable_reason
from paddlenlp_ext.ops.dispatch import on_cpu
from paddlenlp_ext.ops.quantized_weight.codebooks import dynamic_levels


def adamw_cpp(updates: Sequence[AdamWUpdate], beta1: float, beta2: float, epsilon: float) -> None:
    """Update all float32 parameters in one call (csrc/adamw.cpp)."""
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


def adamw_bf16_cpp(updates: Sequence[Bf16Update], beta1: float, beta2: float, epsilon: float) -> None:
    """Update bfloat16 weights: one call for weights with a float32 master copy, one for all other weights."""
    _call_bf16([each for each in updates if each.master is not None], beta1, beta2, epsilon)
    _call_bf16([each for each in updates if each.master is None], beta1, beta2, epsilon)


def _call_bf16(updates: Sequence[Bf16Update], beta1: float, beta2: float, epsilon: float) -> None:
    if not updates:
        return
    columns, masters, positions = zip(*updates, strict=True)
    weights, gradients, *state, rates, decays = zip(*columns, strict=True)
    in_bf16 = all(gradient.dtype == paddle.bfloat16 for gradient in gradients)
    gradients = [gradient.astype("bfloat16" if in_bf16 else "float32").contiguous() for gradient in gradients]
    for weight, gradient in zip(weights, gradients, strict=True):
        assert weight.shape == gradient.shape and weight.dtype == paddle.bfloat16, (
            "the gradient must match the bfloat16 weight"
        )
    copies = None if masters[0] is None else pointers(masters)
    tensors = [pointers(weights), copies, *(pointers(column) for column in (gradients, *state))]
    numbers = [(ctypes.c_float * len(updates))(*column) for column in (rates, decays)]
    draws = None
    if copies is None:
        draws = (struct("DrawPosition") * len(updates))(*(position.as_struct() for position in positions))
    run = function("adamw_update_bf16")
    run(*tensors, *numbers, sizes(weights), len(updates), beta1, beta2, epsilon, draws, in_bf16)


def usable_on_bf16(weight: paddle.Tensor) -> str | None:
    """Return None for a weight on the CPU if the library is available, otherwise why C++ cannot run."""
    return on_cpu(weight) or unavailable_reason()


def adamw_8bit_cpp(updates: Sequence[AdamW8BitUpdate]) -> None:
    """Update parameters with 8-bit moments, one by one."""
    for update in updates:
        update_in_fp32(update, _update_8bit)


def _update_8bit(value: paddle.Tensor, gradient: paddle.Tensor, moments: Moments8Bit, step: AdamStep) -> None:
    """Update the fp32 values of a parameter and its moments in place (csrc/adamw_8bit.cpp)."""
    assert value.shape == gradient.shape and moments.codes1.shape == [-(-value.size // BLOCK), BLOCK]
    numbers = struct("AdamStep")(
        *(step.beta1, 1.0 - step.beta1, step.beta2, 1.0 - step.beta2),
        *(step.correction1, step.correction2, step.epsilon, step.rate),
    )
    tensors = [pointer(tensor) for tensor in (value, gradient.contiguous(), *moments)]
    run = function("adamw_8bit_update")
    run(*tensors, value.size, ctypes.byref(_levels(True)), ctypes.byref(_levels(False)), ctypes.byref(numbers))


@functools.cache
def _levels(signed: bool) -> ctypes.Structure:
    base, _ = search_table(dynamic_levels(signed))
    levels = dynamic_levels(signed)
    borders = np.append((levels[:-1] + levels[1:]) / np.float32(2), np.float32(np.inf))
    arrays = (levels, borders, base)
    found = struct("DynamicLevels")(*(array.ctypes.data for array in arrays))
    found.arrays = arrays  # keeps the arrays alive; the struct holds only addresses
    return found
