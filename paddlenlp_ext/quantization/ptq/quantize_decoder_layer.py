"""Post-training quantization of one decoder layer.

    1. run the calibration batches through the layer in full precision, and record the inputs of the linear layers
    2. AWQ: search the scales of each smoothing mapping, and fold the scales into the producer
    3. experts: record and quantize a few experts at a time, because the statistics of all experts need too much memory
    4. quantize each linear layer

Shapes: G experts, P fused projections of an expert, O outputs, I inputs, F inner features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.nn.experts import ClampedGate, Experts
from paddlenlp_ext.nn.grouped_linear import GroupedLinear
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.submodules import layer_at, replace_layer
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight, stack_weights
from paddlenlp_ext.quantization.ptq.awq import search_scales
from paddlenlp_ext.quantization.ptq.input_statistics import InputStatistics, record_expert_inputs, record_inputs
from paddlenlp_ext.quantization.ptq.quantize_matrix import (
    ErrorTotals,
    PostTrainingOptions,
    prefix_errors,
    quantize_matrix,
)
from paddlenlp_ext.quantization.ptq.smoothing import SmoothingMapping, move_scales
from paddlenlp_ext.quantization.quantized_grouped_linear import QuantizedGroupedLinear
from paddlenlp_ext.quantization.quantized_linear import QuantizedLinear

_STATISTICS_BYTES = 1 << 30
"""Memory limit for the second moments of a group of experts."""


@paddle.no_grad()
def quantize_decoder_layer(
    layer: nn.Layer,
    names: Mapping[str, str],
    mappings: Sequence[SmoothingMapping],
    run: Callable[[], None],
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
        _quantize_experts(layer_at(layer, block), parts, run, options, errors)
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


def _quantize_experts(
    experts: Experts,
    names: Mapping[str, str],
    run: Callable[[], None],
    options: PostTrainingOptions,
    errors: ErrorTotals,
) -> None:
    """Quantize the weights of all experts; `names` maps `gate_up_proj`, `down_proj` or both to names in the model."""
    stacks = {part: getattr(experts, part) for part in names}
    assert all(isinstance(stack, GroupedLinear) for stack in stacks.values()), "experts must not be quantized already"
    moments = 4 * sum(stack.weight_shape[2] ** 2 for stack in stacks.values())
    num_experts, step = experts.num_local, max(1, _STATISTICS_BYTES // moments)
    packed: dict[str, list[list[QuantizedWeight]]] = {part: [] for part in stacks}
    for first in range(0, num_experts, step):
        end = min(first + step, num_experts)
        inputs: dict[str, list[InputStatistics]] = {}
        if options.needs_rows:
            with ExitStack() as recording:
                for part, stack in stacks.items():
                    inputs[part] = recording.enter_context(record_expert_inputs(stack, first, end))
                run()
        for expert in range(first, end):
            matrices = {part: stack.weight[expert].astype("float32").numpy() for part, stack in stacks.items()}
            own = {part: each[expert - first] for part, each in inputs.items()}
            inner = own.get("down_proj")
            can_scale = options.method == "awq" and len(stacks) == 2 and not isinstance(experts.gate, ClampedGate)
            if can_scale and inner is not None and inner.rows:
                with prefix_errors(f"{names['down_proj']}, expert {expert}"):
                    own["down_proj"] = _scale_expert(matrices, inner, options)
            for part, weight in matrices.items():
                parts = np.split(weight, stacks[part].parts)
                title = f"{names[part]}, expert {expert}"
                packed[part].append([quantize_matrix(title, each, own.get(part), options, errors) for each in parts])
    for part, stack in stacks.items():
        setattr(experts, part, QuantizedGroupedLinear(stack_weights(packed[part]), stack.compute_dtype))


def _scale_expert(
    matrices: dict[str, np.ndarray], inputs: InputStatistics, options: PostTrainingOptions
) -> InputStatistics:
    """Scale down_proj, and divide up_proj by the scales; return the input statistics of the scaled down_proj.

    Experts with a clamped gate cannot be scaled, because their output is not linear in the output of up_proj.
    """
    down = matrices["down_proj"]
    inner = down.shape[1]
    scales = search_scales(down, inputs.hessian, inputs.magnitudes, options.integers, np.arange(inner))
    matrices["down_proj"] = down * scales
    matrices["gate_up_proj"] = np.concatenate(
        [matrices["gate_up_proj"][:inner], matrices["gate_up_proj"][inner:] / scales[:, None]]
    )
    return inputs.divided(scales)
