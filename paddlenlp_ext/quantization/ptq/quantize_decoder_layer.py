"""Post-training quantization of one decoder layer.

1. run the calibration batches through the layer in full precision, and record the inputs of the linear layers
2. AWQ: search the scales of each smoothing mapping, and fold the scales into the producer
3. quantize the experts (quantize_experts.py)
4. quantize each linear layer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.submodules import layer_at, replace_layer
from paddlenlp_ext.quantization.ptq.awq import search_scales
from paddlenlp_ext.quantization.ptq.input_statistics import InputStatistics, record_inputs
from paddlenlp_ext.quantization.ptq.quantize_experts import quantize_experts
from paddlenlp_ext.quantization.ptq.quantize_matrix import (
    ErrorTotals,
    PostTrainingOptions,
    prefix_errors,
    quantize_matrix,
)
from paddlenlp_ext.quantization.ptq.smoothing import SmoothingMapping, move_scales
from paddlenlp_ext.quantization.quantized_linear import QuantizedLinear


@paddle.no_grad()
def quantize_decoder_layer(
    layer: nn.Layer,
    names: Mapping[str, str],
    mappings: Sequence[SmoothingMapping],
    run: Callable[[], object],
    options: PostTrainingOptions,
    errors: ErrorTotals,
) -> None:
    """Replace the linear layers and experts of a decoder layer with quantized layers.

    Args:
        layer: the decoder layer.
        names: name within the decoder layer -> name in the model, for each layer to quantize; for error messages.
        mappings: AWQ's smoothing mappings of the decoder layer.
        run: function that runs the calibration batches through the layer.
        options: method and format.
        errors: totals to which the output errors of the matrices are added.

    Raises:
        ValueError: a matrix cannot be quantized (`quantize_matrix`).
    """
    linears: dict[str, Any] = {name: each for name in names if isinstance(each := layer_at(layer, name), Linear)}
    statistics: dict[str, InputStatistics] = {}
    if options.needs_rows:
        with record_inputs(linears) as statistics:
            run()
    if options.method == "awq":
        for mapping in mappings:
            if set(mapping.consumers) <= linears.keys():
                with prefix_errors(names[mapping.consumers[0]]):
                    _apply_smoothing(layer, mapping, statistics, options)
    experts: dict[str, dict[str, str]] = {}
    for name, in_model in names.items():
        if name not in linears:
            block, _, part = name.rpartition(".")
            experts.setdefault(block, {})[part] = in_model
    for block, parts in experts.items():
        quantize_experts(layer_at(layer, block), parts, run, options, errors)
    for name, linear in linears.items():
        weight = linear.weight_value().numpy()
        packed = quantize_matrix(names[name], weight, statistics.get(name), options, errors)
        replace_layer(layer, name, QuantizedLinear(packed, linear.bias, linear.compute_dtype))


def _apply_smoothing(
    layer: nn.Layer, mapping: SmoothingMapping, statistics: dict[str, InputStatistics], options: PostTrainingOptions
) -> None:
    """Search and apply the scales of a mapping; update the statistics of the consumers' inputs."""
    inputs = statistics[mapping.consumers[0]]
    consumers = [layer_at(layer, name) for name in mapping.consumers]
    channels = np.arange(consumers[0].in_features) if mapping.channel_of_input is None else mapping.channel_of_input
    magnitudes = np.bincount(channels, inputs.magnitudes) / np.bincount(channels)
    weight = np.concatenate([consumer.weight_value().numpy() for consumer in consumers])
    scales = search_scales(weight, inputs.hessian, magnitudes.astype(np.float32), options.integers, channels)
    move_scales(layer_at(layer, mapping.producer), consumers, scales, channels)
    scaled = inputs.divided(scales[channels])
    statistics.update(dict.fromkeys(mapping.consumers, scaled))
