"""AdamW with Triton kernels; one launch updates many tensors in fp32 or half precision, optionally with 8-bit moments.

Tested in Triton's interpreter on the CPU (tests/ops/adamw/test_triton.py), except for the launch itself.
Not yet run on a GPU with Paddle.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np
import paddle

from paddlenlp_ext.devices import device_name
from paddlenlp_ext.ops.adamw.launch_tables import TableRow, TensorUpdate, block_map, group_for_launches, table_of
from paddlenlp_ext.ops.adamw.quantizer_8bit import search_table
from paddlenlp_ext.ops.adamw.updates import AdamW8BitUpdate, AdamWUpdate, Bf16Update
from paddlenlp_ext.ops.quantized_weight.codebooks import dynamic_levels
from paddlenlp_ext.ops.stochastic_rounding import DrawPosition
from paddlenlp_ext.ops.tensor_utils import contiguous
from paddlenlp_ext.ops.triton_utils.launch import launch


def adamw_triton(updates: Sequence[AdamWUpdate], beta1: float, beta2: float, epsilon: float) -> None:
    """Update fp32 parameters, with one launch for all tensors of equal alignment."""
    _run_adamw([(update, None, None) for update in updates], beta1, beta2, epsilon)


def adamw_bf16_triton(updates: Sequence[Bf16Update], beta1: float, beta2: float, epsilon: float) -> None:
    """Update parameters in half precision; a parameter without a master copy must be bfloat16."""
    _run_adamw(updates, beta1, beta2, epsilon)


def _run_adamw(
    updates: Sequence[tuple[AdamWUpdate, paddle.Tensor | None, DrawPosition | None]],
    beta1: float,
    beta2: float,
    epsilon: float,
) -> None:
    from paddlenlp_ext.ops.adamw.kernels import launch_adamw

    moments = [(update.moment1, update.moment2) for update, _, _ in updates]
    numbers = _adamw_numbers([update for update, _, _ in updates], epsilon)
    rows = [
        _update(update.parameter, update.gradient, own_moments, own_numbers, master, position)
        for (update, master, position), own_moments, own_numbers in zip(updates, moments, numbers, strict=True)
    ]
    b1, b2 = np.float32(beta1), np.float32(beta2)
    betas = float(b1), float(1 - b1), float(b2), float(1 - b2)
    for group, kinds in group_for_launches(rows):
        launch_adamw(launch, *_tables(group), betas, kinds)
    for update, _, _ in updates:
        update.beta1_power.scale_(beta1)
        update.beta2_power.scale_(beta2)


def _adamw_numbers(updates: Sequence[AdamWUpdate], epsilon: float) -> list[list[float]]:
    """Return decay factor, bias-corrected rate, bias-corrected epsilon and an unused 0 per update, in fp32 as in C++.

    Paddle keeps the powers of beta on the CPU, where reading them does not wait for the GPU.
    """
    powers = ([getattr(each, name).item() for each in updates] for name in ("beta1_power", "beta2_power"))
    power1, power2 = (np.array(column, np.float32) for column in powers)
    rate, decay = (np.array([getattr(each, name) for each in updates], np.float32) for name in ("rate", "decay"))
    correction = np.sqrt(1 - power2)
    numbers = 1 - rate * decay, rate * correction / (1 - power1), np.float32(epsilon) * correction, 0 * rate
    return np.stack(numbers, axis=1).tolist()


def adamw_8bit_triton(updates: Sequence[AdamW8BitUpdate]) -> None:
    """Update parameters with 8-bit moments, with one launch for all tensors of equal dtypes, rounding and alignment."""
    from paddlenlp_ext.ops.adamw.kernels import launch_adamw_8bit

    rows = []
    for parameter, gradient, moments, step, decay, master, position in updates:
        numbers = 1.0 - step.rate * decay, step.rate, step.correction1, step.correction2
        each = _update(parameter, gradient, (moments.codes1, moments.codes2), numbers, master, position)
        scales = {"scales1": _pointer(moments.scales1), "scales2": _pointer(moments.scales2)}
        rows.append(each._replace(row=each.row._replace(**scales)))
    for group, kinds in group_for_launches(rows):
        step, device = updates[0].step, device_name(group[0].weight.place)
        betas = step.beta1, 1.0 - step.beta1, step.beta2, 1.0 - step.beta2
        quantizers = *_quantizer(True, device), *_quantizer(False, device)
        launch_adamw_8bit(launch, *_tables(group), quantizers, betas, step.epsilon, kinds)


@functools.cache
def _quantizer(signed: bool, device: str) -> tuple[paddle.Tensor, ...]:
    """Return the tables of levels, borders and codes for `adamw_8bit_kernel` on a device."""
    levels = dynamic_levels(signed)
    codes, _ = search_table(levels)
    borders = np.append((levels[:-1] + levels[1:]) / np.float32(2), np.float32(np.inf))
    return tuple(paddle.to_tensor(each, place=device) for each in (levels, borders, codes))


def _update(
    weight: paddle.Tensor,
    gradient: paddle.Tensor,
    moments: tuple[paddle.Tensor, paddle.Tensor],
    numbers: Iterable[float],
    master: paddle.Tensor | None,
    position: DrawPosition | None,
) -> TensorUpdate:
    assert weight.shape == gradient.shape, "the gradient must have the shape of the weight"
    gradient = contiguous(gradient)
    row = TableRow(
        weight=_pointer(weight),
        gradient=_pointer(gradient),
        moment1=_pointer(moments[0]),
        moment2=_pointer(moments[1]),
        master=0 if master is None else _pointer(master),
        size=weight.size,
    )
    rounding = "none" if master is None else "nearest"
    if position is not None:
        assert weight.dtype == paddle.bfloat16, "stochastic rounding requires a bfloat16 parameter"
        row = row.with_draws(position)
        rounding = "groups" if row.has_groups else "single"
    assert weight.dtype == paddle.float32 or rounding != "none", (
        "a parameter in half precision needs a master copy or stochastic rounding"
    )
    return TensorUpdate(weight, gradient, row, tuple(numbers), rounding)


def _pointer(tensor: paddle.Tensor) -> int:
    assert tensor.is_contiguous(), "the tensors must be contiguous"
    return tensor.data_ptr()


def _tables(group: Sequence[TensorUpdate]) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    """Return the address table, the hyperparameters and the block map on the device of the weights."""
    device = device_name(group[0].weight.place)
    table, numbers = table_of([each.row for each in group]), np.array([each.numbers for each in group], np.float32)
    blocks = _block_map(tuple(each.row.size for each in group), device)
    return paddle.to_tensor(table, place=device), paddle.to_tensor(numbers, place=device), blocks


@functools.lru_cache(maxsize=4)
def _block_map(sizes: tuple[int, ...], device: str) -> paddle.Tensor:
    """Return the block map on a device, cached because the sizes are the same in all steps."""
    from paddlenlp_ext.ops.adamw.kernels import SPAN

    return paddle.to_tensor(block_map(sizes, SPAN), place=device)
