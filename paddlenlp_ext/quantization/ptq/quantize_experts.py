"""Post-training quantization of the experts of a decoder layer.

A few experts are recorded and quantized at a time, because the statistics of all experts would need too much memory.
AWQ scales the input of down_proj separately for each expert (`_scale_expert`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

import numpy as np

from paddlenlp_ext.nn.experts import ClampedGate, Experts
from paddlenlp_ext.nn.grouped_linear import GroupedLinear
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight, stack_weights
from paddlenlp_ext.quantization.ptq.awq import search_scales
from paddlenlp_ext.quantization.ptq.input_statistics import InputStatistics, record_expert_inputs
from paddlenlp_ext.quantization.ptq.quantize_matrix import (
    ErrorTotals,
    PostTrainingOptions,
    prefix_errors,
    quantize_matrix,
)
from paddlenlp_ext.quantization.quantized_grouped_linear import QuantizedGroupedLinear

_STATISTICS_BYTES = 1 << 30
"""Memory limit for the second moments of a group of experts."""


def quantize_experts(
    experts: Experts,
    names: Mapping[str, str],
    run: Callable[[], object],
    options: PostTrainingOptions,
    errors: ErrorTotals,
) -> None:
    """Quantize the layers in `names` of every expert; `names` maps names in the experts to names in the model."""
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
            is_linear = "gate_up_proj" in stacks and "down_proj" in stacks and not isinstance(experts.gate, ClampedGate)
            if options.method == "awq" and is_linear and inner is not None and inner.rows:
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

    Experts without a gate or with a clamped gate cannot be scaled, because their output is not linear in the output of
    up_proj.
    """
    down = matrices["down_proj"]
    inner = down.shape[1]
    scales = search_scales(down, inputs.hessian, inputs.magnitudes, options.integers, np.arange(inner))
    matrices["down_proj"] = down * scales
    matrices["gate_up_proj"] = np.concatenate(
        [matrices["gate_up_proj"][:inner], matrices["gate_up_proj"][inner:] / scales[:, None]]
    )
    return inputs.divided(scales)
