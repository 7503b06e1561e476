"""Sharding layer by layer: gradients go to their owners while the backward pass runs, values come for a pass alone.

A layer's gradients go when the layer below has had its backward pass. In the third stage a value stands at its owner,
which lends it to the others: a decoder layer's parameters come before its forward pass and go after it, come again
before its backward pass and go with the gradients. What stands outside the layers (embedding, last norm, head: a tied
pair is one parameter) stays for the whole pass. All sharding ranks go through the same layers in the same order.
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
    """Hooks on a model that hand gradients over, borrow values and give them back.

    Args:
        model: a `CausalLM` or `PeftModel`.
        parameters: of the model; `parameter.owner` is the index of the rank that keeps what is shared out.
        axis: the sharding ranks.
        reduce: sums gradients of some parameters at their owners.
        lends: whether the values are shared out too; else every rank has them all the time.
    """

    def __init__(self, model: Any, parameters: list[paddle.Tensor], axis: Axis, reduce: Reduce, *, lends: bool) -> None:
        decoder = getattr(model, "base_model", model).model
        self.lends, self._reduce = lends, reduce
        self._layers = [_Unit(own, axis, lends) for own in _of_each_layer(decoder.layers, parameters)]
        in_layers = {id(parameter) for unit in self._layers for parameter in unit.parameters}
        self._others = _Unit([p for p in parameters if id(p) not in in_layers], axis, lends)
        self._in_backward, self._stays = False, False
        self._left = set(range(len(self._layers)))  # layers that this pass has not finished
        decoder.embed_tokens.register_forward_pre_hook(self._borrow_others)
        decoder.layers[0].register_forward_pre_hook(self._borrow_others)
        decoder.norm.register_forward_post_hook(self._watch_for_backward)
        for index, unit in enumerate(self._layers):
            decoder.layers[index].register_forward_pre_hook(self._before_layer(index))
            decoder.layers[index].register_forward_post_hook(self._after_layer(index))
            unit.give_back()
        self._others.give_back()

    def end_pass(self) -> None:
        """Send the gradients that are left to their owners, and give everything back.

        A rank that had no backward pass does the same sums here as the others did in theirs, in their order.
        """
        self._finish_above(-1)
        self._reduce(self._others.parameters)
        self._others.give_back()
        self._left.update(range(len(self._layers)))
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
            self._finish_above(index)

        def hook(layer: nn.Layer, inputs: tuple[Any, ...]) -> None:
            self._layers[index].borrow()
            if paddle.is_grad_enabled() and not (self._stays or inputs[0].stop_gradient):
                inputs[0].register_hook(is_done)

        return hook

    def _after_layer(self, index: int) -> Callable[..., None]:
        def begin(gradient: paddle.Tensor) -> None:
            self._layers[index].borrow()

        def hook(layer: nn.Layer, inputs: tuple[Any, ...], output: paddle.Tensor) -> None:
            if self._stays:
                return
            if paddle.is_grad_enabled() and not output.stop_gradient:
                output.register_hook(begin)
            if not self._in_backward:  # else it is a recomputed layer, whose backward pass comes at once
                self._layers[index].give_back()

        return hook

    def _finish_above(self, index: int) -> None:
        for above in sorted((layer for layer in self._left if layer > index), reverse=True):
            self._left.discard(above)
            self._reduce(self._layers[above].parameters)
            self._layers[above].give_back()


class _Unit:
    """Parameters whose gradients go together, and whose values come and go together where they are lent."""

    def __init__(self, parameters: list[paddle.Tensor], axis: Axis, lends: bool) -> None:
        self.parameters, self._axis, self._is_whole = parameters, axis, True
        self._lent = parameters if lends else []
        for parameter in self._lent:
            parameter.is_lent = parameter.owner != axis.index

    @paddle.no_grad()
    def borrow(self) -> None:
        """Every value, from its owner; nothing where they are here already."""
        if self._is_whole:
            return
        for parameter in self._lent:
            value = parameter.detach()
            if parameter.is_lent:
                value = paddle.empty(parameter.shape, parameter.dtype)
            dist.broadcast(value, src=self._axis.ranks[parameter.owner], group=self._axis.group)
            if parameter.is_lent:
                value._share_buffer_to(parameter)
        self._is_whole = True

    def give_back(self) -> None:
        """Forget what is others'; shapes stay."""
        for parameter in self._lent:
            if parameter.is_lent and parameter._is_initialized():
                parameter._clear_data()
        self._is_whole = False


def _of_each_layer(layers: nn.LayerList, parameters: list[paddle.Tensor]) -> list[list[paddle.Tensor]]:
    """The parameters of each layer that no other layer has."""
    ids = {id(parameter) for parameter in parameters}
    members = [list({id(p): p for p in layer.parameters() if id(p) in ids}.values()) for layer in layers]
    readers = Counter(id(parameter) for own in members for parameter in own)
    return [[parameter for parameter in own if readers[id(parameter)] == 1] for own in members]
