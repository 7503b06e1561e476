"""Activation recomputation: choose which activations are saved and which are computed again in the backward pass.

Layers mark regions (`recompute_region("flash_attn", function, tensors)`) and contain no other recompute logic. A
`RecomputePlan` decides what happens in each region. All plans compute the same numbers, random numbers included.

| granularity | recomputed | saved |
|---|---|---|
| full | the layer | its input |
| full_attn | attention with its projections | the input of attention |
| core_attn | attention between the projections | queries, keys and values |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import paddle
from paddle.autograd import PyLayer, saved_tensors_hooks
from paddle.distributed.fleet.utils import recompute

from paddlenlp_ext.config.recompute_options import parse_layers, parse_refined
from paddlenlp_ext.config.sections.train import TrainConfig
from paddlenlp_ext.nn.activation_offload import OffloadedTensor, offload
from paddlenlp_ext.ops.cpp.bf16 import capture_precision

LayerCall = Callable[[paddle.Tensor, Any], paddle.Tensor]
_GRANULARITY_AT = {"full_attn": "full_attn", "flash_attn": "core_attn"}
"""Granularity at which a region is recomputed as a block of its own."""


@dataclass(frozen=True)
class RecomputePlan:
    """Selection of the activations to recompute.

    Attributes:
        granularity: "full", "full_attn" or "core_attn".
        excluded_layers: layers that save all activations.
        saved_regions: region -> the number of layers, from the first, in which the region's result is saved although
            the layer is recomputed; -1 for all layers. This saves the region's computation and, under tensor
            parallelism, its communication. Only with "full".
        offloads_inputs: whether the inputs of recomputed layers are saved off the device
            (nn/activation_offload.py). Only with "full".
    """

    granularity: str = "full"
    excluded_layers: frozenset[int] = frozenset()
    saved_regions: Mapping[str, int] = field(default_factory=dict)
    offloads_inputs: bool = False

    @classmethod
    def from_config(cls, options: TrainConfig) -> RecomputePlan | None:
        """Build the plan that `config.train` describes; None if nothing is recomputed."""
        if not options.recompute:
            return None
        layers = frozenset(parse_layers(options.no_recompute_layers))
        regions = parse_refined(options.refined_recompute)
        return cls(options.recompute_granularity, layers, regions, options.offload_recompute_inputs)

    def check_layers(self, num_layers: int) -> None:
        """Check that the excluded layers exist in a model of `num_layers` layers.

        Raises:
            ValueError: one or more do not exist; the message lists them.
        """
        missing = sorted(layer for layer in self.excluded_layers if not 0 <= layer < num_layers)
        if missing:
            raise ValueError(f"no_recompute_layers names {missing}; the model's layers are 0 to {num_layers - 1}")

    def saves(self, region: str, layer: int) -> bool:
        """Return True if the region's result is saved in `layer`, which is recomputed."""
        number = self.saved_regions.get(region, 0)
        return number == -1 or layer < number

    def run_layer(self, layer: LayerCall, index: int, x: paddle.Tensor, inputs: Any) -> paddle.Tensor:
        """Return `layer(x, inputs)`, saving only the activations that the plan selects; `x` must require a gradient."""
        if index in self.excluded_layers:
            return layer(x, inputs)
        state = _LayerRecompute(self, index)

        def run(x: paddle.Tensor, inputs: Any) -> paddle.Tensor:
            with _recomputing(state):
                return layer(x, inputs)

        if self.granularity != "full":
            return run(x, inputs)
        return _recompute_offloaded(run, x, inputs) if self.offloads_inputs else _recompute(run, x, inputs)


def recompute_region(region: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)`, whose result a plan may save or compute again.

    Args:
        region: name of the region.
        function: function of the tensors and of parameters; other values that it reads must not require gradients.
        arguments: tensors; for "full_attn" also other objects.
    """
    state = _current[-1]
    if state is None:
        return function(*arguments)
    granularity = state.plan.granularity
    if granularity == _GRANULARITY_AT.get(region):
        return _recompute(function, *arguments)
    if granularity == "full" and state.plan.saves(region, state.layer):
        return state.keep(function, arguments)
    return function(*arguments)


def value_of_first_run(key: str, value: Any) -> Any:
    """Return `value`, or in the second run of a recomputed layer the value under `key` of its first run.

    Other forward passes may lie between the two runs, as in a pipeline.
    """
    state = _current[-1]
    return value if state is None else state.first_values.setdefault(key, value)


def _recompute(function: Callable[..., Any], *arguments: Any) -> Any:
    """Recompute a block with the matmul precision of its first run: bf16 matmuls may be disabled by then."""
    return recompute(capture_precision(function), *arguments)


def _recompute_offloaded(function: LayerCall, x: paddle.Tensor, inputs: Any) -> paddle.Tensor:
    """Recompute a layer whose input `x` is off the device between the forward and the backward pass."""
    offloaded = offload(x)  # here, because an error in a hook would lose its type
    is_running = False

    def run(x: paddle.Tensor, inputs: Any) -> paddle.Tensor:
        nonlocal is_running
        is_running = True
        try:
            return function(x, inputs)
        finally:
            is_running = False

    def pack(tensor: paddle.Tensor) -> paddle.Tensor | OffloadedTensor:
        return tensor if is_running else offloaded  # saved regions save tensors during the run, Paddle saves x after it

    def unpack(saved: paddle.Tensor | OffloadedTensor) -> paddle.Tensor:
        return saved if isinstance(saved, paddle.Tensor) else saved.load()

    with saved_tensors_hooks(pack, unpack):
        return _recompute(run, x, inputs)


@dataclass(frozen=True)
class _RegionRecord:
    """Saved computation of a region: its own graph from copies of the inputs, and the random state after it."""

    inputs: tuple[paddle.Tensor, ...]
    outputs: tuple[paddle.Tensor, ...]
    is_single: bool
    random_state: Any


class _LayerRecompute:
    """State of one recomputed layer: its forward pass, and the same pass again before its backward pass."""

    def __init__(self, plan: RecomputePlan, layer: int) -> None:
        self.plan, self.layer = plan, layer
        self.first_values: dict[str, Any] = {}
        self._records: deque[_RegionRecord] = deque()

    def keep(self, function: Callable[..., Any], tensors: Sequence[paddle.Tensor]) -> Any:
        """Compute and save the region the first time; return the saved result the second time."""
        if paddle.is_grad_enabled():
            record = self._records.popleft()
            paddle.set_rng_state(record.random_state)
            return _SavedRegion.apply(record, *tensors)
        copies = tuple(tensor.detach() for tensor in tensors)
        for copy in copies:
            copy.stop_gradient = False
        with paddle.enable_grad():
            result = function(*copies)
        is_single = isinstance(result, paddle.Tensor)
        outputs = (result,) if is_single else tuple(result)
        self._records.append(_RegionRecord(copies, outputs, is_single, paddle.get_rng_state()))
        detached = tuple(output.detach() for output in outputs)
        return detached[0] if is_single else detached


class _SavedRegion(PyLayer):
    """Autograd node that joins a saved region to the recomputed tensors around it."""

    @staticmethod
    def forward(ctx, record, *tensors):
        ctx.record, ctx.needs_grad = record, [not tensor.stop_gradient for tensor in tensors]
        outputs = tuple(output.detach() for output in record.outputs)
        return outputs[0] if record.is_single else outputs

    @staticmethod
    def backward(ctx, *gradients):
        record = ctx.record
        paddle.autograd.backward(list(record.outputs), list(gradients))
        found = [x.grad if needed else None for x, needed in zip(record.inputs, ctx.needs_grad, strict=True)]
        return found[0] if len(found) == 1 else tuple(found)


_current: list[_LayerRecompute | None] = [None]


@contextmanager
def _recomputing(state: _LayerRecompute) -> Iterator[None]:
    """Make `state` the current layer of `recompute_region` within the block."""
    _current.append(state)
    try:
        yield
    finally:
        _current.pop()
