"""Training with 8-bit integer matmuls (`int8_training`, ops/int8_linear): select layers, and measure their errors.

Blocks of activations and gradients are rounded to int8 with one scale per block, so a block with an outlier has large
errors in its other values. The error of each layer is measured on the first micro-batch of a run, and layers with a
large error compute with unrounded activations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial

import paddle
from paddle import nn

from paddlenlp_ext.ops.int8_linear import int8_linear
from paddlenlp_ext.ops.int8_linear.cpp import unavailable_reason
from paddlenlp_ext.ops.quantized_linear import quantized_linear
from paddlenlp_ext.quantization.quantized_linear import QuantizedLinear
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger(__name__)

MAX_ERROR = 0.05
"""Largest error in `measured_errors` with which a layer still computes in 8-bit integers."""
_MEASURED_ROWS = 256


def multiply_in_int8(model: nn.Layer) -> None:
    """Enable 8-bit integer matmuls in a model's quantized linear layers, if their format supports this.

    Raises:
        ValueError: this machine has no fast 8-bit matmuls.
    """
    reason = unavailable_reason()
    if reason is not None:
        raise ValueError(
            f"int8_training: {reason}; leave int8_training out, and set bf16: true if the processor supports bfloat16"
        )
    for layer in model.sublayers():
        if isinstance(layer, QuantizedLinear):
            layer.multiplies_in_int8 = layer.stored.is_plain


def int8_linears(model: nn.Layer) -> dict[str, QuantizedLinear]:
    """Return a dict from names to layers, for the layers that compute in 8-bit integers."""
    layers = {name: each for name, each in model.named_sublayers() if isinstance(each, QuantizedLinear)}
    return {name: layer for name, layer in layers.items() if layer.multiplies_in_int8}


@contextmanager
def measured_errors(model: nn.Layer) -> Iterator[dict[str, float]]:
    """Context manager: measure the errors of layers that compute in 8-bit integers, on the block's first forward pass.

    The error of a layer is the root mean square of |y8 - y| / |y| over a sample of rows. y8 and y are the outputs,
    without bias, for rounded and unrounded rows of x. Yields a dict from layer names to errors.
    """
    errors: dict[str, float] = {}
    layers = int8_linears(model)
    for name, layer in layers.items():
        layer.measure_int8 = partial(_measure, errors, name, layer)
    try:
        yield errors
    finally:
        for layer in layers.values():
            layer.measure_int8 = None


def _measure(errors: dict[str, float], name: str, layer: QuantizedLinear, x: paddle.Tensor) -> None:
    if name in errors:
        return
    with paddle.no_grad():
        rows = x.detach().reshape([-1, x.shape[-1]])
        rows = rows[:: -(-rows.shape[0] // _MEASURED_ROWS)].contiguous()
        exact, weight = quantized_linear(rows, layer.stored), layer.stored
        squares = ((int8_linear(rows, weight) - exact) ** 2).sum(axis=1) / (exact**2).sum(axis=1).clip(min=1e-30)
        errors[name] = float(squares.mean()) ** 0.5


def inaccurate_layers(errors: dict[str, float]) -> list[str]:
    """Return the layers whose error is above `MAX_ERROR` or NaN, and log one line about all layers."""
    inaccurate = [name for name, error in errors.items() if not error <= MAX_ERROR]
    if not errors:
        return inaccurate
    typical, name = sorted(errors.values())[len(errors) // 2], max(errors, key=lambda name: errors[name])
    measured = f"relative error of the matmuls on the first batch: median {typical:.1%}, largest {errors[name]:.1%}"
    logger.info("int8_training: %d layers in 8 bits; %s (%s)", len(errors) - len(inaccurate), measured, _shown(name))
    if inaccurate:
        logger.warning(
            "int8_training: %d layers with errors above %.0f %% compute with unrounded activations: %s",
            len(inaccurate),
            100 * MAX_ERROR,
            ", ".join(f"{_shown(name)} ({errors[name]:.0%})" for name in inaccurate),
        )
    return inaccurate


def keep_activations(model: nn.Layer, names: Collection[str]) -> None:
    """Disable 8-bit integer matmuls in the layers `names`; their activations are then not rounded."""
    layers = int8_linears(model)
    for name in names:
        if name in layers:
            layers[name].multiplies_in_int8 = False


def _shown(name: str) -> str:
    """Return the name of a layer without the parts that adapters add."""
    return name.removeprefix("base_model.").removesuffix(".base")
