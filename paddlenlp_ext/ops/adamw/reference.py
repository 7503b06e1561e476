"""AdamW steps in plain Paddle, one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import paddle
import paddle.nn.functional as F

from paddlenlp_ext.ops.adamw.quantizer_8bit import dynamic_8bit
from paddlenlp_ext.ops.adamw.updates import BLOCK, AdamStep, AdamW8BitUpdate, AdamWUpdate, Bf16Update, Moments8Bit
from paddlenlp_ext.ops.stochastic_rounding import stochastic_round
from paddlenlp_ext.ops.tensor_utils import slices_share_memory

_SLICE = 1024
"""Number of blocks dequantized at a time. In fp32, these blocks have 1 MB, which fits into the cache of a core."""


def adamw_reference(updates: Sequence[AdamWUpdate], beta1: float, beta2: float, epsilon: float) -> None:
    """Update float32 parameters one by one in plain Paddle."""
    for parameter, gradient, moment1, moment2, beta1_power, beta2_power, rate, decay in updates:
        moment1.set_value(moment1 * beta1 + gradient * (1 - beta1))
        moment2.set_value(moment2 * beta2 + gradient.square() * (1 - beta2))
        mean, mean_square = moment1 / (1 - beta1_power), moment2 / (1 - beta2_power)
        decayed = parameter * (1 - rate * decay)
        parameter.set_value(decayed - mean / (mean_square.sqrt() + epsilon) * rate)
        beta1_power.set_value(beta1_power * beta1)
        beta2_power.set_value(beta2_power * beta2)


def adamw_bf16_reference(updates: Sequence[Bf16Update], beta1: float, beta2: float, epsilon: float) -> None:
    """Update bfloat16 weights one by one in plain Paddle."""
    for update, master, position in updates:
        weight = update.parameter
        value = weight.astype("float32") if master is None else master
        wide = update._replace(parameter=value, gradient=update.gradient.astype("float32"))
        adamw_reference([wide], beta1, beta2, epsilon)
        weight.set_value(value.astype(weight.dtype) if position is None else stochastic_round(value, position))


def adamw_8bit_reference(updates: Sequence[AdamW8BitUpdate]) -> None:
    """For each parameter, dequantize the moments, update values and moments in fp32, and requantize the moments."""
    for update in updates:
        update_in_fp32(update, _update_by_slices)


def update_in_fp32(
    update: AdamW8BitUpdate, run: Callable[[paddle.Tensor, paddle.Tensor, Moments8Bit, AdamStep], None]
) -> None:
    """Apply weight decay and the in-place fp32 update `run`, and round the result to the parameter's dtype."""
    parameter, gradient, moments, step, decay, master, position = update
    value = parameter if parameter.dtype == paddle.float32 else master
    if value is None:
        value = parameter.astype("float32")
    if decay > 0.0:
        value.scale_(1.0 - step.rate * decay)
    run(value, gradient.astype("float32"), moments, step)
    if position is not None:
        parameter.set_value(stochastic_round(value, position))
    elif value is not parameter:
        parameter.set_value(value.astype(parameter.dtype))


def _update_by_slices(value: paddle.Tensor, gradient: paddle.Tensor, moments: Moments8Bit, step: AdamStep) -> None:
    """Update an fp32 value in place, `_SLICE` blocks at a time."""
    flat_value, flat_gradient = value.reshape([-1]), gradient.reshape([-1])
    updated = []
    for first in range(0, moments.codes1.shape[0], _SLICE):
        blocks, elements = slice(first, first + _SLICE), slice(first * BLOCK, (first + _SLICE) * BLOCK)
        values, block_moments = flat_value[elements], Moments8Bit(*(tensor[blocks] for tensor in moments))
        quotient = _quotient_of_blocks(_in_blocks(flat_gradient[elements]), block_moments, step)
        values.subtract_(quotient.reshape([-1])[: values.shape[0]].scale_(step.rate))
        updated.append((values, *block_moments))
    if not slices_share_memory(value):
        flat_values, *parts = map(paddle.concat, zip(*updated, strict=True))
        value.set_value(flat_values.reshape(value.shape))
        for moment, part in zip(moments, parts, strict=True):
            moment.set_value(part)


def _quotient_of_blocks(gradient: paddle.Tensor, moments: Moments8Bit, step: AdamStep) -> paddle.Tensor:
    """Return the update direction [blocks, BLOCK] and update the moments in place."""
    stored = [
        (dynamic_8bit(True), moments.codes1, moments.scales1),
        (dynamic_8bit(False), moments.codes2, moments.scales2),
    ]
    numbers = [quantizer.dequantize(codes, scales) for quantizer, codes, scales in stored]
    moment1, moment2 = numbers
    step.accumulate(moment1, moment2, gradient)
    for moment, (quantizer, codes, scales) in zip(numbers, stored, strict=True):
        for new, live in zip(quantizer.quantize(moment), (codes, scales), strict=True):
            paddle.assign(new, live)
    return step.quotient(moment1, moment2)


def _in_blocks(flat: paddle.Tensor) -> paddle.Tensor:
    """Reshape a flat tensor to rows of `BLOCK` values, padding the last row with zeros."""
    missing = -flat.shape[0] % BLOCK
    return (F.pad(flat, [0, missing]) if missing else flat).reshape([-1, BLOCK])
