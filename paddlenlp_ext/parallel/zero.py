"""ZeRO (arXiv:1910.02054): sharding ranks process different micro-batches and distribute the training state.

    stage   held only by the owner of a parameter   gradients                       values
    1       optimizer state                         all-reduced                     broadcast after each optimizer step
    2       optimizer state, gradient               reduced to the owner by layer   broadcast after each optimizer step
    3       optimizer state, gradient, value        reduced to the owner by layer   broadcast before each layer

The owner updates its parameters. A parameter is not sliced: the owner holds the full tensor, so every optimizer works
unchanged. Experts sharded by expert parallelism have no owner. Every rank that holds an expert updates the expert.

All ranks keep the gradients and values of adapters, because adapters are small and AdaLoRA reads both on every rank.
With an adapter, stage 3 therefore shards only the optimizer state and the frozen base model.

In stage 3, the parameters of a decoder layer are gathered before the layer's forward pass and released afterwards. The
parameters are gathered again for the layer's backward pass. They are released when the backward pass of the preceding
layer ends, because all gradients of the layer are then complete and reduced. Parameters outside the decoder layers
(embedding, last norm, lm_head) stay gathered during the micro-batch. All sharding ranks must run the same layers in the
same order.
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
from paddlenlp_ext.sharding_spec import (
    full_shape,
    is_expert_parallel,
    is_on_stage,
    placement_of,
    set_placement,
    shard_of,
)

Reduce = Callable[[list[paddle.Tensor]], None]


class ParameterGatherer:
    """Register hooks on a model: the hooks reduce gradients to their owners, and gather and release parameter values.

    Args:
        model: `CausalLM` or `PeftModel`.
        parameters: parameters to handle; `Placement.owner` is the rank of the owner.
        axis: mesh axis of the sharding ranks.
        reduce: function that sums the gradients of parameters on their owners.
        gathers_values: True in stage 3, where ranks other than the owner hold a value only while a layer needs it.
    """

    def __init__(
        self, model: Any, parameters: list[paddle.Tensor], axis: ProcessAxis, reduce: Reduce, *, gathers_values: bool
    ) -> None:
        decoder = model.get_base_model().model
        self.gathers_values, self._reduce = gathers_values, reduce
        self._layers = [_Unit(own, axis, gathers_values) for own in _of_each_layer(decoder.layers, parameters)]
        in_layers = {id(parameter) for unit in self._layers for parameter in unit.parameters}
        self._others = _Unit([p for p in parameters if id(p) not in in_layers], axis, gathers_values)
        self._in_backward, self._keeps_gathered = False, False
        self._left = set(range(len(self._layers)))  # layers whose gradients are not reduced yet
        decoder.embed_tokens.register_forward_pre_hook(self._gather_others)
        decoder.layers[0].register_forward_pre_hook(self._gather_others)
        decoder.norm.register_forward_post_hook(self._watch_for_backward)
        for index, unit in enumerate(self._layers):
            decoder.layers[index].register_forward_pre_hook(self._before_layer(index))
            decoder.layers[index].register_forward_post_hook(self._after_layer(index))
            unit.release()
        self._others.release()

    def after_micro_batch(self) -> None:
        """Reduce the remaining gradients to their owners, and release all values.

        A rank without a backward pass in this micro-batch calls the collectives of all layers here.
        """
        self._finish_above(-1)
        self._reduce(self._others.parameters)
        self._others.release()
        self._left.update(range(len(self._layers)))
        self._in_backward = False

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Return a context in which every rank holds all parameter values."""
        self._keeps_gathered = True
        for unit in (self._others, *self._layers):
            unit.gather()
        try:
            yield
        finally:
            self._keeps_gathered = False
            for unit in (self._others, *self._layers):
                unit.release()

    def _gather_others(self, layer: nn.Layer, inputs: tuple[Any, ...]) -> None:
        self._others.gather()

    def _watch_for_backward(self, layer: nn.Layer, inputs: tuple[Any, ...], output: paddle.Tensor) -> None:
        """Register a hook that detects the start of the backward pass."""

        def begin(gradient: paddle.Tensor) -> None:
            self._in_backward = True

        if not (self._keeps_gathered or output.stop_gradient):
            output.register_hook(begin)

    def _before_layer(self, index: int) -> Callable[..., None]:
        """Return a forward pre-hook that gathers the parameter values of a layer.

        The hook also registers a gradient hook on the input of the layer, which reduces the gradients of the layers
        above and releases their values.
        """

        def is_done(gradient: paddle.Tensor) -> None:
            # At this point, only the layers above have complete gradients. A parameter gradient of this layer, such as
            # a bias gradient, may be computed after the gradient of the layer's input.
            self._finish_above(index)

        def hook(layer: nn.Layer, inputs: tuple[Any, ...]) -> None:
            self._layers[index].gather()
            if paddle.is_grad_enabled() and not (self._keeps_gathered or inputs[0].stop_gradient):
                inputs[0].register_hook(is_done)

        return hook

    def _after_layer(self, index: int) -> Callable[..., None]:
        """Return a forward hook that releases the parameter values of a layer.

        The hook also registers a gradient hook on the output of the layer, which gathers the values again.
        """

        def begin(gradient: paddle.Tensor) -> None:
            self._layers[index].gather()

        def hook(layer: nn.Layer, inputs: tuple[Any, ...], output: paddle.Tensor) -> None:
            if self._keeps_gathered:
                return
            if paddle.is_grad_enabled() and not output.stop_gradient:
                output.register_hook(begin)
            if not self._in_backward:  # when a layer is recomputed, its backward pass follows immediately
                self._layers[index].release()

        return hook

    def _finish_above(self, index: int) -> None:
        """Reduce the gradients of the layers above layer `index`, and release their parameter values."""
        for above in sorted((layer for layer in self._left if layer > index), reverse=True):
            self._left.discard(above)
            self._reduce(self._layers[above].parameters)
            self._layers[above].release()


class _Unit:
    """Parameters whose gradients are reduced together, and whose values are gathered and released together."""

    def __init__(self, parameters: list[paddle.Tensor], axis: ProcessAxis, gathers_values: bool) -> None:
        self.parameters, self._axis, self._is_gathered = parameters, axis, True
        self._gathered_values = parameters if gathers_values else []
        for parameter in self._gathered_values:
            set_placement(parameter, is_gathered_copy=placement_of(parameter).owner != axis.index)

    @paddle.no_grad()
    def gather(self) -> None:
        """Broadcast every value from its owner; do nothing if the values are already gathered."""
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
        """Free the values that other ranks own; the parameters keep their shapes."""
        for parameter in self._gathered_values:
            if placement_of(parameter).is_gathered_copy and has_storage(parameter):
                free_storage(parameter)
        self._is_gathered = False


def _of_each_layer(layers: nn.LayerList, parameters: list[paddle.Tensor]) -> list[list[paddle.Tensor]]:
    """Return, for each layer, the members of `parameters` that the layer does not share with other layers."""
    ids = {id(parameter) for parameter in parameters}
    by_layer = [list({id(p): p for p in layer.parameters() if id(p) in ids}.values()) for layer in layers]
    num_users = Counter(id(parameter) for own in by_layer for parameter in own)
    return [[parameter for parameter in own if num_users[id(parameter)] == 1] for own in by_layer]


class Sharding:
    """ZeRO over the sharding ranks; `Placement.owner` is the owner of each parameter.

    Args:
        model: `CausalLM` or `PeftModel`, equal on all sharding ranks.
        mesh: device mesh of the run.
        stage: ZeRO stage, 1 to 3.

    Raises:
        ValueError: in stage 2 or 3 without an adapter, a rank would own no trainable parameter.
    """

    def __init__(self, model: Any, mesh: Mesh, stage: int) -> None:
        self.axis, self._data, self._replicas = mesh.sharding, mesh.data, mesh.replicas
        is_adapter = isinstance(model, PeftModel)
        # Sharded experts have no owner.
        shared = [p for p in model.parameters() if not is_expert_parallel(p)]
        # A layer that AdaLoRA pruned to rank 0 has empty parameters, which need no owner.
        trained = [p for p in shared if not p.stop_gradient and is_on_stage(p) and p.size]
        gathered = [p for p in shared if not is_adapter or p.stop_gradient] if stage == 3 else []
        frozen = [parameter for parameter in gathered if parameter.stop_gradient]
        self._assign_owners(trained, stays_with_all=is_adapter or stage == 1)
        _choose_owners(frozen, self.axis.size)
        reduced = trained if stage >= 2 and not is_adapter else []
        self._reduced_to_owner = {id(parameter) for parameter in reduced}
        self._broadcast = [] if gathered and not is_adapter else trained
        hooked = gathered or reduced
        self._gatherer = (
            ParameterGatherer(model, hooked, self.axis, self._reduce, gathers_values=bool(gathered)) if hooked else None
        )

    @property
    def forward_is_collective(self) -> bool:
        """True in stage 3, where the forward pass calls collectives and therefore must run on all ranks."""
        return self._gatherer is not None and self._gatherer.gathers_values

    def after_micro_batch(self) -> None:
        """Reduce the remaining gradients to their owners, and release the gathered values."""
        if self._gatherer is not None:
            self._gatherer.after_micro_batch()

    def sum_gradients(self, parameters: Sequence[paddle.Tensor]) -> None:
        """Complete the gradient sums over all replicas after the last micro-batch of an optimizer step."""
        sum_gradients([p for p in parameters if id(p) not in self._reduced_to_owner], self._replicas.group)
        if self._data.size > 1:
            own = [p for p in parameters if id(p) in self._reduced_to_owner and self.is_owner(p)]
            sum_gradients(own, self._data.group)

    def is_owner(self, parameter: paddle.Tensor) -> bool:
        """Return whether this process owns the parameter."""
        return placement_of(parameter).owner == self.axis.index

    @paddle.no_grad()
    def broadcast_updated(self) -> None:
        """Broadcast updated values from their owners after the optimizer step."""
        for owner, members in self._by_owner(self._broadcast):
            for bucket in buckets(members):
                flat = paddle.concat([parameter.detach().reshape([-1]) for parameter in bucket])
                dist.broadcast(flat, src=self.axis.ranks[owner], group=self.axis.group)
                if owner != self.axis.index:
                    for parameter, value in zip(bucket, flat.split([p.size for p in bucket]), strict=True):
                        parameter.set_value(value.reshape(parameter.shape))

    def gathered_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which every sharding rank holds all parameter values, for example for generation."""
        return nullcontext() if self._gatherer is None else self._gatherer.gathered()

    def _assign_owners(self, trained: list[paddle.Tensor], stays_with_all: bool) -> None:
        """Assign the trainable parameters to owners.

        Args:
            trained: trainable parameters.
            stays_with_all: whether all ranks keep the gradients and values.

        Raises:
            ValueError: a rank would own no parameter, and `stays_with_all` is False.
        """
        _choose_owners(trained, self.axis.size)
        for parameter in trained:
            set_placement(parameter, is_updated_here=self.is_owner(parameter))
        owners = {_owner(parameter) for parameter in trained}
        if not stays_with_all and len(owners) < self.axis.size:  # all ranks choose the same owners, so all ranks raise
            raise ValueError(
                f"sharding_parallel_degree {self.axis.size}: too large for {len(trained)} trainable parameters, "
                f"because every process must own one; choose at most {len(owners)}"
            )
        if trained and self.axis.index not in owners:
            # An optimizer needs at least one parameter, so this rank also updates the smallest parameter.
            set_placement(min(trained, key=lambda parameter: parameter.size), is_updated_here=True)

    @paddle.no_grad()
    def _reduce(self, parameters: list[paddle.Tensor]) -> None:
        """Sum each gradient on the owner of its parameter, in place, and free the gradient on the other ranks."""
        reduced = [parameter for parameter in parameters if id(parameter) in self._reduced_to_owner]
        if not reduced:
            return
        for owner, members in self._by_owner(fill_missing_gradients(reduced, self.axis.group)):
            for bucket in buckets([parameter.grad for parameter in members if parameter.grad is not None]):
                flat = paddle.concat([gradient.reshape([-1]) for gradient in bucket])
                dist.reduce(flat, dst=self.axis.ranks[owner], group=self.axis.group)
                if owner == self.axis.index:
                    for gradient, value in zip(bucket, flat.split([g.size for g in bucket]), strict=True):
                        gradient.set_value(value.reshape(gradient.shape))
            if owner != self.axis.index:
                for parameter in members:
                    parameter.clear_gradient(False)

    def _by_owner(self, parameters: list[paddle.Tensor]) -> Iterator[tuple[int, list[paddle.Tensor]]]:
        """Yield (owner, its parameters) in rank order; omit ranks that own none of the parameters."""
        for owner in range(self.axis.size):
            members = [parameter for parameter in parameters if _owner(parameter) == owner]
            if members:
                yield owner, members


def _choose_owners(parameters: list[paddle.Tensor], ranks: int) -> None:
    """Assign owners so that each rank owns about the same number of values.

    All tensor ranks must choose the same owners. Only the first tensor rank holds the biases of row-parallel layers.
    These biases are assigned last, so that they do not change the owners of the other parameters.
    """
    first_rank_only = [p for p in parameters if p.is_distributed and shard_of(p) is None]
    on_all_ranks = [p for p in parameters if not (p.is_distributed and shard_of(p) is None)]
    for members in (on_all_ranks, first_rank_only):
        sizes = [math.prod(full_shape(parameter)) for parameter in members]
        for parameter, owner in zip(members, balanced_owners(sizes, ranks), strict=True):
            set_placement(parameter, owner=owner)


def _owner(parameter: paddle.Tensor) -> int:
    owner = placement_of(parameter).owner
    assert owner is not None, "owners must be assigned before they are read"
    return owner


def balanced_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Assign sizes to ranks in descending order, each to the rank with the smallest total; return one rank per size."""
    owners, totals = [0] * len(sizes), [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = totals.index(min(totals))
        totals[owners[index]] += sizes[index]
    return owners
