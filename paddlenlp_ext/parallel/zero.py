"""Sharding layer by layer: gradients go to their owners while the backward pass runs, values come for a pass alone.

A layer's gradients go when the layer below has had its backward pass. In the third stage a value stands at its owner,
which lends it to the others: a decoder layer's parameters come before its forward pass and go after it, come again
before its backward pass and go with the gradients. What stands outside the layers (embedding, last norm, head: a tied
pair is one parameter) stays for the whole pass. All sharding ranks go through the same layers in the same order.

Sharding: processes with micro-batches of their own share what they would all keep alike (ZeRO, arXiv 1910.02054).

    stage 1   each parameter is updated by one process, its owner, which alone keeps the optimizer's state of it
    stage 2   the owner alone keeps its gradient too: the others send it on, layer by layer (loans.py)
    stage 3   the owner alone keeps its value too, between passes

Whole parameters are shared out, not slices of them: an owner's optimizer does what it would do on one process,
whichever optimizer it is. An adapter's own parameters are few: their gradients and values stay with all, since methods
that choose ranks look at them, and stage 3 shares the frozen base out instead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn

from paddlenlp_ext.paddle_compat import free_storage, has_storage, share_storage
from paddlenlp_ext.parallel.collectives import buckets, fill_missing_gradients, sum_gradients
from paddlenlp_ext.parallel.mesh import Mesh, ProcessAxis
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.sharding_spec import full_shape, is_on_stage, placement_of, set_placement, shard_of

Reduce = Callable[[list[paddle.Tensor]], None]


class ParameterGatherer:
    """Hooks on a model that hand gradients over, borrow values and give them back.

    Args:
        model: a `CausalLM` or `PeftModel`.
        parameters: of the model; `Placement.owner` is the index of the rank that keeps what is shared out.
        axis: the sharding ranks.
        reduce: sums gradients of some parameters at their owners.
        lends: whether the values are shared out too; else every rank has them all the time.
    """

    def __init__(
        self, model: Any, parameters: list[paddle.Tensor], axis: ProcessAxis, reduce: Reduce, *, gathers_values: bool
    ) -> None:
        decoder = getattr(model, "base_model", model).model
        self.gathers_values, self._reduce = gathers_values, reduce
        self._layers = [_Unit(own, axis, gathers_values) for own in _of_each_layer(decoder.layers, parameters)]
        in_layers = {id(parameter) for unit in self._layers for parameter in unit.parameters}
        self._others = _Unit([p for p in parameters if id(p) not in in_layers], axis, gathers_values)
        self._in_backward, self._stays = False, False
        self._left = set(range(len(self._layers)))  # layers that this pass has not finished
        decoder.embed_tokens.register_forward_pre_hook(self._gather_others)
        decoder.layers[0].register_forward_pre_hook(self._gather_others)
        decoder.norm.register_forward_post_hook(self._watch_for_backward)
        for index, unit in enumerate(self._layers):
            decoder.layers[index].register_forward_pre_hook(self._before_layer(index))
            decoder.layers[index].register_forward_post_hook(self._after_layer(index))
            unit.release()
        self._others.release()

    def after_micro_batch(self) -> None:
        """Send the gradients that are left to their owners, and give everything back.

        A rank that had no backward pass does the same sums here as the others did in theirs, in their order.
        """
        self._finish_above(-1)
        self._reduce(self._others.parameters)
        self._others.release()
        self._left.update(range(len(self._layers)))
        self._in_backward = False

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A block in which all values are here."""
        self._stays = True
        for unit in (self._others, *self._layers):
            unit.gather()
        try:
            yield
        finally:
            self._stays = False
            for unit in (self._others, *self._layers):
                unit.release()

    def _gather_others(self, layer: nn.Layer, inputs: tuple[Any, ...]) -> None:
        self._others.gather()

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
            self._layers[index].gather()
            if paddle.is_grad_enabled() and not (self._stays or inputs[0].stop_gradient):
                inputs[0].register_hook(is_done)

        return hook

    def _after_layer(self, index: int) -> Callable[..., None]:
        def begin(gradient: paddle.Tensor) -> None:
            self._layers[index].gather()

        def hook(layer: nn.Layer, inputs: tuple[Any, ...], output: paddle.Tensor) -> None:
            if self._stays:
                return
            if paddle.is_grad_enabled() and not output.stop_gradient:
                output.register_hook(begin)
            if not self._in_backward:  # else it is a recomputed layer, whose backward pass comes at once
                self._layers[index].release()

        return hook

    def _finish_above(self, index: int) -> None:
        for above in sorted((layer for layer in self._left if layer > index), reverse=True):
            self._left.discard(above)
            self._reduce(self._layers[above].parameters)
            self._layers[above].release()


class _Unit:
    """Parameters whose gradients go together, and whose values come and go together where they are lent."""

    def __init__(self, parameters: list[paddle.Tensor], axis: ProcessAxis, gathers_values: bool) -> None:
        self.parameters, self._axis, self._is_gathered = parameters, axis, True
        self._gathered_values = parameters if gathers_values else []
        for parameter in self._gathered_values:
            set_placement(parameter, is_gathered_copy=placement_of(parameter).owner != axis.index)

    @paddle.no_grad()
    def gather(self) -> None:
        """Every value, from its owner; nothing where they are here already."""
        if self._is_gathered:
            return
        for parameter in self._gathered_values:
            value = parameter.detach()
            is_copy = placement_of(parameter).is_gathered_copy
            if is_copy:
                value = paddle.empty(parameter.shape, parameter.dtype)
            dist.broadcast(value, src=self._axis.ranks[_owner(parameter)], group=self._axis.group)
            if is_copy:
                share_storage(value, parameter)
        self._is_gathered = True

    def release(self) -> None:
        """Forget what is others'; shapes stay."""
        for parameter in self._gathered_values:
            if placement_of(parameter).is_gathered_copy and has_storage(parameter):
                free_storage(parameter)
        self._is_gathered = False


def _of_each_layer(layers: nn.LayerList, parameters: list[paddle.Tensor]) -> list[list[paddle.Tensor]]:
    """The parameters of each layer that no other layer has."""
    ids = {id(parameter) for parameter in parameters}
    members = [list({id(p): p for p in layer.parameters() if id(p) in ids}.values()) for layer in layers]
    readers = Counter(id(parameter) for own in members for parameter in own)
    return [[parameter for parameter in own if readers[id(parameter)] == 1] for own in members]


class Sharding:
    """Shares a model out over the sharding ranks; marks at its parameters say what is whose (plan.py).

    Args:
        model: a `CausalLM` or `PeftModel`, the same on all of these ranks.
        mesh: the run's.
        stage: 1, 2 or 3.

    Raises:
        ValueError: more ranks than parameters.
    """

    def __init__(self, model: Any, mesh: Mesh, stage: int) -> None:
        self.axis, self._data, self._replicas = mesh.sharding, mesh.data, mesh.replicas
        is_adapter = isinstance(model, PeftModel)
        # One of no numbers, of a layer that AdaLoRA left no rank, has nothing to share.
        trained = [p for p in model.parameters() if not p.stop_gradient and is_on_stage(p) and p.size]
        lent = [p for p in model.parameters() if not is_adapter or p.stop_gradient] if stage == 3 else []
        frozen = [parameter for parameter in lent if parameter.stop_gradient]
        self._give_owners(trained, stays_with_all=is_adapter or stage == 1)
        _choose_owners(frozen, self.axis.size)
        scattered = trained if stage >= 2 and not is_adapter else []
        self._scattered = {id(parameter) for parameter in scattered}
        self._broadcast = [] if lent and not is_adapter else trained
        shared = lent or scattered
        self._gatherer = (
            ParameterGatherer(model, shared, self.axis, self._reduce, gathers_values=bool(lent)) if shared else None
        )

    @property
    def forward_is_collective(self) -> bool:
        """Whether every forward pass needs all ranks."""
        return self._gatherer is not None and self._gatherer.gathers_values

    def after_micro_batch(self) -> None:
        """After each micro-batch: the gradients that are left go to their owners, lent values go."""
        if self._gatherer is not None:
            self._gatherer.after_micro_batch()

    def sum_gradients(self, parameters: Sequence[paddle.Tensor]) -> None:
        """At the end of a window: every gradient is summed over all replicas, where it stands."""
        sum_gradients([p for p in parameters if id(p) not in self._scattered], self._replicas.group)
        if self._data.size > 1:
            own = [p for p in parameters if id(p) in self._scattered and self.is_owner(p)]
            sum_gradients(own, self._data.group)

    def is_owner(self, parameter: paddle.Tensor) -> bool:
        """Whether this process counts as the one that has the parameter."""
        return placement_of(parameter).owner == self.axis.index

    @paddle.no_grad()
    def broadcast_updated(self) -> None:
        """After the optimizer's step: what an owner updated goes to the others."""
        for owner, members in self._by_owner(self._broadcast):
            for bucket in buckets(members):
                flat = paddle.concat([parameter.detach().reshape([-1]) for parameter in bucket])
                dist.broadcast(flat, src=self.axis.ranks[owner], group=self.axis.group)
                if owner != self.axis.index:
                    for parameter, value in zip(bucket, flat.split([p.size for p in bucket]), strict=True):
                        parameter.set_value(value.reshape(parameter.shape))

    def gathered_parameters(self) -> AbstractContextManager[None]:
        """A block in which every process has all values, as generating in its own time needs."""
        return nullcontext() if self._gatherer is None else self._gatherer.whole()

    def _give_owners(self, trained: list[paddle.Tensor], stays_with_all: bool) -> None:
        _choose_owners(trained, self.axis.size)
        for parameter in trained:
            set_placement(parameter, is_updated_here=self.is_owner(parameter))
        owners = {_owner(parameter) for parameter in trained}
        if not stays_with_all and len(owners) < self.axis.size:  # known to all ranks, which end together
            raise ValueError(
                f"sharding_parallel_degree {self.axis.size} is too large for {len(trained)} parameters that train, of "
                f"which every process needs one; choose one of at most {len(owners)}"
            )
        if trained and self.axis.index not in owners:
            # An optimizer needs something to update: this one repeats what the smallest parameter's owner does.
            set_placement(min(trained, key=lambda parameter: parameter.size), is_updated_here=True)

    @paddle.no_grad()
    def _reduce(self, parameters: list[paddle.Tensor]) -> None:
        """Gradients summed at their owners, which add to what they have; the others' go."""
        wanted = [parameter for parameter in parameters if id(parameter) in self._scattered]
        if not wanted:
            return
        for owner, members in self._by_owner(fill_missing_gradients(wanted, self.axis.group)):
            for bucket in buckets([parameter.grad for parameter in members]):
                flat = paddle.concat([gradient.reshape([-1]) for gradient in bucket])
                dist.reduce(flat, dst=self.axis.ranks[owner], group=self.axis.group)
                if owner == self.axis.index:
                    for gradient, value in zip(bucket, flat.split([g.size for g in bucket]), strict=True):
                        gradient.set_value(value.reshape(gradient.shape))
            if owner != self.axis.index:
                for parameter in members:
                    parameter.clear_gradient(False)

    def _by_owner(self, parameters: list[paddle.Tensor]) -> Iterator[tuple[int, list[paddle.Tensor]]]:
        for owner in range(self.axis.size):
            members = [parameter for parameter in parameters if _owner(parameter) == owner]
            if members:
                yield owner, members


def _choose_owners(parameters: list[paddle.Tensor], ranks: int) -> None:
    """The same for the parts of a parameter on all tensor ranks, although one of these may have a bias for all."""
    alone = [p for p in parameters if p.is_distributed and shard_of(p) is None]
    with_parts = [p for p in parameters if not (p.is_distributed and shard_of(p) is None)]
    for members in (with_parts, alone):
        sizes = [math.prod(full_shape(parameter)) for parameter in members]
        for parameter, owner in zip(members, balanced_owners(sizes, ranks), strict=True):
            set_placement(parameter, owner=owner)


def _owner(parameter: paddle.Tensor) -> int:
    owner = placement_of(parameter).owner
    assert owner is not None, "owners are assigned before they are asked for"
    return owner


def balanced_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """The owner of each size: the largest first, to whoever has least, so that totals differ little."""
    owners, totals = [0] * len(sizes), [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = totals.index(min(totals))
        totals[owners[index]] += sizes[index]
    return owners


def build_sharding(model: Any, mesh: Mesh, name: str) -> Sharding | None:
    """The sharding that `config.parallel.sharding` names; None where there is none, or one sharding rank."""
    if mesh.sharding.size == 1:
        return None
    stages = {"stage1": 1, "stage2": 2, "stage3": 3}
    (stage,) = (stages[word] for word in name.split() if word in stages)
    return Sharding(model, mesh, stage)
