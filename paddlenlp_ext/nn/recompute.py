"""What a training pass keeps for its way back, and what it computes again there.

The layers name their places (`recompute_region("flash_attn", function, tensors)`) and know nothing else; a plan says
what is done at them. Every choice gives the same numbers: what is computed again is the same, random numbers included.

    full        a layer's input is kept, the layer is run again
    full_attn   the same for its attention, with the projections
    core_attn   the same for attention between the projections: queries, keys and values are kept
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import paddle
from paddle.autograd import PyLayer
from paddle.distributed.fleet.utils import recompute

from paddlenlp_ext.config.recompute_options import parse_layers, parse_refined
from paddlenlp_ext.config.sections import TrainConfig
from paddlenlp_ext.ops.cpu.bf16 import capture_precision

LayerCall = Callable[[paddle.Tensor, Any], paddle.Tensor]
_GRANULARITY_AT = {"full_attn": "full_attn", "flash_attn": "core_attn"}
"""Which granularity computes a place again as a block of its own."""


@dataclass(frozen=True)
class RecomputePlan:
    """What is computed again.

    Attributes:
        granularity: "full", "full_attn" or "core_attn".
        excluded_layers: layers that keep everything.
        saved_regions: region -> the number of layers, from the first, in which the region's result is saved although
            the layer is recomputed; -1 for all layers. This saves the region's computation and, under tensor
            parallelism, its communication. Only with "full".
    """

    granularity: str = "full"
    excluded_layers: frozenset[int] = frozenset()
    saved_regions: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_config(cls, options: TrainConfig) -> RecomputePlan | None:
        """The plan of `config.train`, None where nothing is computed again."""
        if not options.recompute:
            return None
        layers = frozenset(parse_layers(options.no_recompute_layers))
        return cls(options.recompute_granularity, layers, parse_refined(options.refined_recompute))

    def check_layers(self, num_layers: int) -> None:
        """Refuse layers that a model has not.

        Raises:
            ValueError: names them.
        """
        missing = sorted(layer for layer in self.excluded_layers if not 0 <= layer < num_layers)
        if missing:
            raise ValueError(f"no_recompute_layers names {missing}; the model's layers are 0 to {num_layers - 1}")

    def saves(self, place: str, layer: int) -> bool:
        """Whether a place's result stays in that layer, which is run again."""
        number = self.saved_regions.get(place, 0)
        return number == -1 or layer < number

    def run_layer(self, layer: LayerCall, index: int, x: paddle.Tensor, inputs: Any) -> paddle.Tensor:
        """`layer(x, inputs)`, of which only what the plan keeps stays; `x` must want a gradient."""
        if index in self.excluded_layers:
            return layer(x, inputs)
        state = _LayerRecompute(self, index)

        def run(x: paddle.Tensor, inputs: Any) -> paddle.Tensor:
            with _recomputing(state):
                return layer(x, inputs)

        return _recompute(run, x, inputs) if self.granularity == "full" else run(x, inputs)


def recompute_region(place: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, where a plan may keep the result or compute it again.

    Args:
        place: its name.
        function: of these tensors and of parameters; what else it reads must not want a gradient.
        arguments: tensors (at "full_attn" also what is none).
    """
    state = _current[-1]
    if state is None:
        return function(*arguments)
    granularity = state.plan.granularity
    if granularity == _GRANULARITY_AT.get(place):
        return _recompute(function, *arguments)
    if granularity == "full" and state.plan.saves(place, state.layer):
        return state.keep(function, arguments)
    return function(*arguments)


def _recompute(function: Callable[..., Any], *arguments: Any) -> Any:
    """Recompute, in the products of the first time: bfloat16 may be off by the time of the second."""
    return recompute(capture_precision(function), *arguments)


@dataclass(frozen=True)
class _RegionRecord:
    """A kept computation: its own graph, from copies of its inputs, and the random numbers' state behind it."""

    inputs: tuple[paddle.Tensor, ...]
    outputs: tuple[paddle.Tensor, ...]
    is_single: bool
    random_state: Any


class _LayerRecompute:
    """One layer's way forwards, and the same way again before it comes back."""

    def __init__(self, plan: RecomputePlan, layer: int) -> None:
        self.plan, self.layer = plan, layer
        self._records: deque[_RegionRecord] = deque()

    def keep(self, function: Callable[..., Any], tensors: Sequence[paddle.Tensor]) -> Any:
        """The first time compute and keep; the second time give what was kept."""
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
    """A kept computation joined to the tensors that were computed again."""

    @staticmethod
    def forward(ctx, record, *tensors):
        ctx.record, ctx.wanted = record, [not tensor.stop_gradient for tensor in tensors]
        outputs = tuple(output.detach() for output in record.outputs)
        return outputs[0] if record.is_single else outputs

    @staticmethod
    def backward(ctx, *gradients):
        record = ctx.record
        paddle.autograd.backward(list(record.outputs), list(gradients))
        found = [x.grad if wanted else None for x, wanted in zip(record.inputs, ctx.wanted, strict=True)]
        return found[0] if len(found) == 1 else tuple(found)


_current: list[_LayerRecompute | None] = [None]


@contextmanager
def _recomputing(state: _LayerRecompute) -> Iterator[None]:
    _current.append(state)
    try:
        yield
    finally:
        _current.pop()
