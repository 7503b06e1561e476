"""Activation recomputation (gradient checkpointing): which activations are saved, and which are recomputed.

Layers mark regions (`recompute_region("flash_attn", function, tensors)`) and contain no other recompute logic. A
`RecomputePlan` decides which regions are recomputed. All plans give the same results up to rounding, including dropout.
Layers of a plan that selects regions run op by op, not in training blocks (models/training_blocks.py).

| granularity | recomputed | saved |
|---|---|---|
| full | the layer | the input of the layer |
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

LayerCall = Callable[..., Any]
"""Decoder layer: function of the hidden states and other inputs."""
_GRANULARITY_AT = {"full_attn": "full_attn", "flash_attn": "core_attn"}
"""Granularity that recomputes each region."""


@dataclass(frozen=True)
class RecomputePlan:
    """Plan that selects the activations to recompute.

    Attributes:
        granularity: "full", "full_attn" or "core_attn".
        excluded_layers: indices of layers that save all activations.
        saved_regions: region -> number of layers, counted from the first, that save the result of the region; -1: all
            layers. The recomputation of these layers skips the computation and the communication of the region. Only
            with "full".
        offloads_inputs: whether to offload the inputs of recomputed layers (nn/activation_offload.py). Only with
            "full".
    """

    granularity: str = "full"
    excluded_layers: frozenset[int] = frozenset()
    saved_regions: Mapping[str, int] = field(default_factory=dict)
    offloads_inputs: bool = False

    @classmethod
    def from_config(cls, options: TrainConfig) -> RecomputePlan | None:
        """Build the plan that `config.train` describes; return None if nothing is recomputed."""
        if not options.recompute:
            return None
        layers = frozenset(parse_layers(options.no_recompute_layers))
        regions = parse_refined(options.refined_recompute)
        return cls(options.recompute_granularity, layers, regions, options.offload_recompute_inputs)

    def check_layers(self, num_layers: int) -> None:
        """Check that the excluded layers exist in a model of `num_layers` layers.

        Raises:
            ValueError: an excluded layer does not exist.
        """
        missing = sorted(layer for layer in self.excluded_layers if not 0 <= layer < num_layers)
        if missing:
            raise ValueError(f"no_recompute_layers: the model has no layers {missing}; use 0 to {num_layers - 1}")

    def saves(self, region: str, layer: int) -> bool:
        """Return whether a recomputed layer saves the result of a region."""
        number = self.saved_regions.get(region, 0)
        return number == -1 or layer < number

    def run_layer(self, layer: LayerCall, index: int, x: paddle.Tensor, *inputs: Any) -> Any:
        """Return `layer(x, *inputs)`, saving only the activations that the plan selects.

        `x` must require a gradient. Other tensors with gradients must be arguments, not attributes of arguments.
        """
        if index in self.excluded_layers:
            return layer(x, *inputs)
        state = _LayerRecompute(self, index)

        def run(x: paddle.Tensor, *inputs: Any) -> Any:
            with _recomputing(state):
                return layer(x, *inputs)

        if self.granularity != "full":
            return run(x, *inputs)
        return _recompute_offloaded(run, x, *inputs) if self.offloads_inputs else _recompute(run, x, *inputs)


def recompute_region(region: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)`; save or recompute its activations according to the current plan.

    Args:
        region: name of the region.
        function: function that reads only parameters and `arguments`; other tensors must not require gradients.
        arguments: tensors; for the region "full_attn", other objects too.
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


def is_recomputed() -> bool:
    """Return True during the forward pass of a layer that will be recomputed, and during its recomputation."""
    return _current[-1] is not None


def selects_regions() -> bool:
    """Return whether the current plan saves or recomputes single regions of a layer."""
    state = _current[-1]
    return state is not None and (state.plan.granularity != "full" or bool(state.plan.saved_regions))


def value_of_first_run(key: str, value: Any) -> Any:
    """Return `value` in a forward pass; in a recomputation, return the `value` of the layer's forward pass.

    The two values may differ: under pipeline parallelism, forward passes of other micro-batches precede the
    recomputation.
    """
    state = _current[-1]
    return value if state is None else state.first_values.setdefault(key, value)


def _recompute(function: Callable[..., Any], *arguments: Any) -> Any:
    """Recompute a block with the matmul precision and the random numbers of its forward pass."""
    compute, state = capture_precision(function), _RandomState()

    def run(*arguments: Any) -> Any:
        if not paddle.is_grad_enabled():  # forward pass
            return compute(*arguments)
        current = _RandomState()
        state.restore()
        try:
            return compute(*arguments)
        finally:
            current.restore()

    return recompute(run, *arguments, preserve_rng_state=False)


def _recompute_offloaded(function: LayerCall, x: paddle.Tensor, *inputs: Any) -> Any:
    """Recompute a layer, and offload its input `x` between the forward and the backward pass."""
    address = x.data_ptr()
    offloaded = offload(x)  # not in `pack`, because Paddle changes the type of an error that a hook raises
    is_running = False

    def run(x: paddle.Tensor, *inputs: Any) -> Any:
        nonlocal is_running
        is_running = True
        try:
            return function(x, *inputs)
        finally:
            is_running = False

    def pack(tensor: paddle.Tensor) -> paddle.Tensor | OffloadedTensor:
        # Saved regions pack tensors while `run` is running; Paddle packs x and tensors of other layers afterwards.
        return tensor if is_running or tensor.data_ptr() != address else offloaded

    def unpack(saved: paddle.Tensor | OffloadedTensor) -> paddle.Tensor:
        return saved if isinstance(saved, paddle.Tensor) else saved.load()

    with saved_tensors_hooks(pack, unpack):
        return _recompute(run, x, *inputs)


class _RandomState:
    """State of the random generators of the current device and of the CPU.

    Paddle draws on the CPU if the device has no kernel for dropout; `preserve_rng_state` saves only the device's state.
    """

    def __init__(self) -> None:
        self._of_device, self._of_cpu = paddle.get_rng_state(), paddle.get_rng_state("cpu")

    def restore(self) -> None:
        paddle.set_rng_state(self._of_device)
        paddle.set_rng_state(self._of_cpu, "cpu")


@dataclass(frozen=True)
class _RegionRecord:
    """Saved forward pass of a region: autograd graph from copied inputs to outputs, and the final random state."""

    inputs: tuple[paddle.Tensor, ...]
    outputs: tuple[paddle.Tensor, ...]
    is_single: bool
    random_state: _RandomState


class _LayerRecompute:
    """State of one recomputed layer, shared by its forward pass and its recomputation."""

    def __init__(self, plan: RecomputePlan, layer: int) -> None:
        self.plan, self.layer = plan, layer
        self.first_values: dict[str, Any] = {}
        self._records: deque[_RegionRecord] = deque()

    def keep(self, function: Callable[..., Any], tensors: Sequence[paddle.Tensor]) -> Any:
        """Compute and save a region in the forward pass; return the saved result in the recomputation."""
        if paddle.is_grad_enabled():
            record = self._records.popleft()
            record.random_state.restore()
            return _SavedRegion.apply(record, *tensors)
        copies = tuple(tensor.detach() for tensor in tensors)
        for copy in copies:
            copy.stop_gradient = False
        with paddle.enable_grad():
            result = function(*copies)
        is_single = isinstance(result, paddle.Tensor)
        outputs = (result,) if is_single else tuple(result)
        self._records.append(_RegionRecord(copies, outputs, is_single, _RandomState()))
        detached = tuple(output.detach() for output in outputs)
        return detached[0] if is_single else detached


class _SavedRegion(PyLayer):
    """Autograd node that connects a saved region to the recomputed tensors around it."""

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
    """Make `recompute_region` use `state` within a `with` block."""
    _current.append(state)
    try:
        yield
    finally:
        _current.pop()
