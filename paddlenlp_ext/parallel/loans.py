"""Sharding's third stage: a value stands at its owner, which lends it to the others for as long as a pass needs it.

A decoder layer's parameters come before its forward pass and go after it, come again before its backward pass and go
when the layer below has had its own. What stands outside the layers (embedding, last norm, head: a tied pair is one
parameter) stays for the whole pass. All sharding ranks go through the same layers in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn

from paddlenlp_ext.parallel.mesh import Axis

Reduce = Callable[[list[paddle.Tensor]], None]


class Loans:
    """Hooks on a model that borrow values and give them back.

    Args:
        model: a `CausalLM` or `PeftModel`.
        parameters: of the model, to be lent; `parameter.owner` is the index of the rank that keeps it.
        axis: the sharding ranks.
        reduce: sums gradients of some parameters at their owners.
    """

    def __init__(self, model: Any, parameters: list[paddle.Tensor], axis: Axis, reduce: Reduce) -> None:
        decoder = getattr(model, "base_model", model).model
        self._reduce = reduce
        self._layers = [_Unit(own, axis) for own in _of_each_layer(decoder.layers, parameters)]
        in_layers = {id(parameter) for unit in self._layers for parameter in unit.parameters}
        self._others = _Unit([p for p in parameters if id(p) not in in_layers], axis)
        self._in_backward, self._stays = False, False
        self._begun: set[int] = set()  # layers whose backward pass has begun
        decoder.embed_tokens.register_forward_pre_hook(self._borrow_others)
        decoder.layers[0].register_forward_pre_hook(self._borrow_others)
        decoder.norm.register_forward_post_hook(self._watch_for_backward)
        for index, unit in enumerate(self._layers):
            decoder.layers[index].register_forward_pre_hook(self._before_layer(index))
            decoder.layers[index].register_forward_post_hook(self._after_layer(index))
            unit.give_back()
        self._others.give_back()

    def end_pass(self) -> None:
        """Send the gradients that are left to their owners, and give everything back."""
        for index in sorted(self._begun, reverse=True):
            self._finish(index)
        self._reduce(self._others.parameters)
        self._others.give_back()
        self._in_backward = False

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A block in which all values are here."""
        self._stays = True
        for unit in (self._others, *self._layers):
            unit.borrow()
        try:
            yield
        finally:
            self._stays = False
            for unit in (self._others, *self._layers):
                unit.give_back()

    def _borrow_others(self, layer: nn.Layer, inputs: tuple[Any, ...]) -> None:
        self._others.borrow()

    def _watch_for_backward(self, layer: nn.Layer, inputs: tuple[Any, ...], output: paddle.Tensor) -> None:
        def begin(gradient: paddle.Tensor) -> None:
            self._in_backward = True

        if not (self._stays or output.stop_gradient):
            output.register_hook(begin)

    def _before_layer(self, index: int) -> Callable[..., None]:
        def is_done(gradient: paddle.Tensor) -> None:
            # One layer late: nodes aside of the way down, such as those of biases, may come after the input's.
            for above in [other for other in sorted(self._begun, reverse=True) if other > index]:
                self._finish(above)

        def hook(layer: nn.Layer, inputs: tuple[Any, ...]) -> None:
            self._layers[index].borrow()
            if paddle.is_grad_enabled() and not (self._stays or inputs[0].stop_gradient):
                inputs[0].register_hook(is_done)

        return hook

    def _after_layer(self, index: int) -> Callable[..., None]:
        def begin(gradient: paddle.Tensor) -> None:
            self._layers[index].borrow()
            self._begun.add(index)

        def hook(layer: nn.Layer, inputs: tuple[Any, ...], output: paddle.Tensor) -> None:
            if self._stays:
                return
            if paddle.is_grad_enabled() and not output.stop_gradient:
                output.register_hook(begin)
            if not self._in_backward:  # else it is a recomputed layer, whose backward pass comes at once
                self._layers[index].give_back()

        return hook

    def _finish(self, index: int) -> None:
        self._begun.discard(index)
        self._reduce(self._layers[index].parameters)
        self._layers[index].give_back()


class _Unit:
    """Parameters that come and go together."""

    def __init__(self, parameters: list[paddle.Tensor], axis: Axis) -> None:
        self.parameters, self._axis, self._is_whole = parameters, axis, True
        for parameter in parameters:
            parameter.is_lent = parameter.owner != axis.index

    @paddle.no_grad()
    def borrow(self) -> None:
        """Every value, from its owner; nothing where they are here already."""
        if self._is_whole:
            return
        for parameter in self.parameters:
            value = parameter.detach()
            if parameter.is_lent:
                value = paddle.empty(parameter.shape, parameter.dtype)
            dist.broadcast(value, src=self._axis.ranks[parameter.owner], group=self._axis.group)
            if parameter.is_lent:
                value._share_buffer_to(parameter)
        self._is_whole = True

    def give_back(self) -> None:
        """Forget what is others'; shapes stay."""
        for parameter in self.parameters:
            if parameter.is_lent and parameter._is_initialized():
                parameter._clear_data()
        self._is_whole = False


def _of_each_layer(layers: nn.LayerList, parameters: list[paddle.Tensor]) -> list[list[paddle.Tensor]]:
    """The parameters of each layer that no other layer has."""
    ids = {id(parameter) for parameter in parameters}
    members = [list({id(p): p for p in layer.parameters() if id(p) in ids}.values()) for layer in layers]
    readers = Counter(id(parameter) for own in members for parameter in own)
    return [[parameter for parameter in own if readers[id(parameter)] == 1] for own in members]
