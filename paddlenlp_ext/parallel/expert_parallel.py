r"""Expert parallelism (arXiv:2006.16668): each replica of an expert group holds different experts of every layer.

The replicas process different micro-batches:

    rank 0                              rank 1
    tokens a, b                         tokens c, d
    rows a0 a2 | b1 b3                  rows c0 c1 | d0 d3          digit: the chosen expert
         \__________________ all-to-all ___________________/
    experts 0, 1: a0 c0 d0 b1 c1        experts 2, 3: a2 b3 d3
         \__________________ all-to-all ___________________/
    a = a0 + a2, b = b1 + b3            c = c0 + c1, d = d0 + d3

A row is the hidden state of one token for one of its experts. An all-to-all sends each row to the rank that holds the
expert, and a second all-to-all sends the weighted outputs back. The ranks first exchange the row counts, so that any
distribution of rows is possible and no row is dropped. The backward pass sends the gradients in the opposite direction.

Forward hooks on the expert layers call the collectives, so adapters on the experts process the received rows. With
tensor parallelism, the experts are sharded first over the tensor ranks, then over the expert ranks. The gradient of an
expert already includes all tokens of the expert group, so gradients of experts are summed only across expert groups.
Every expert rank holds a copy of the routers, the shared experts and all other layers.

Shapes: T local tokens, K chosen experts per token, D hidden, N = T x K rows of local tokens, M received rows, P expert
ranks, E experts per rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.nn.experts import Experts, MixtureOfExperts
from paddlenlp_ext.nn.grouped_linear import GroupedLinear
from paddlenlp_ext.nn.submodules import layer_at
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.ops.expert_rows import ExpertRows, gather_rows, sum_rows
from paddlenlp_ext.parallel.collectives import all_to_all_rows, exchange_rows
from paddlenlp_ext.parallel.mesh import ProcessAxis
from paddlenlp_ext.parallel.shard_parameters import own_tensors, set_own_tensor, shard_experts
from paddlenlp_ext.peft.layers import AdapterLayer
from paddlenlp_ext.quantization.quantized_grouped_linear import QuantizedGroupedLinear
from paddlenlp_ext.sharding_spec import is_on_stage

_STACKS = (Experts, GroupedLinear, QuantizedGroupedLinear)
"""Layer types whose tensors all have one slice per expert."""


class ExpertShards:
    """Shard the experts of a model over the expert ranks, and install the hooks that exchange rows.

    Args:
        model: `CausalLM` or `PeftModel`, identical on all expert ranks, and already sharded over the tensor ranks.
        axis: mesh axis of the expert-parallel ranks.

    Raises:
        ValueError: the model has no experts, the degree does not divide the number of experts, or a tensor in an expert
            layer does not have one slice per expert.
    """

    def __init__(self, model: TrainableModel, axis: ProcessAxis) -> None:
        decoder = model.get_base_model()
        assert isinstance(decoder, CausalLM)
        check_experts(decoder.config, axis.size)
        self._layers = []
        for name, mixture in decoder.named_sublayers():
            if isinstance(mixture, MixtureOfExperts):
                _check_all_stacked(mixture.experts, f"{name}.experts", axis.size)
                self._layers.append(ExpertExchange(mixture.experts, axis))

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Return a context in which every rank holds all experts and exchanges no rows.

        All ranks must enter the context.
        """
        for layer in self._layers:
            layer.gather()
        try:
            yield
        finally:
            for layer in self._layers:
                layer.release()


def check_experts(config: DecoderConfig, degree: int, tensor_degree: int = 1) -> None:
    """Check that `degree` divides the number of experts that each tensor-parallel rank holds.

    Args:
        config: configuration of the model.
        degree: number of expert-parallel ranks.
        tensor_degree: number of tensor-parallel ranks.

    Raises:
        ValueError: the model has no experts, or `degree` does not divide the number of experts.
    """
    numbers = {shape.num_experts for shape in config.experts or () if shape is not None}
    if degree > 1 and not numbers:
        raise ValueError(f"expert_parallel_degree {degree}: the model has no experts; remove the key")
    for number in numbers:
        if number % (degree * tensor_degree):
            works = [d for d in range(1, degree) if number % (d * tensor_degree) == 0]
            with_tensor = f" times tensor_parallel_degree {tensor_degree}" if tensor_degree > 1 else ""
            raise ValueError(
                f"expert_parallel_degree {degree}{with_tensor} does not divide the {number} experts of a layer; the "
                f"next smaller valid degree is {max(works, default=1)}"
            )


def _check_all_stacked(experts: Experts, name: str, degree: int) -> None:
    stacked = {id(own_tensors(layer)[leaf]) for layer, leaf in _stacked_tensors(experts)}
    tensors = [*experts.named_parameters(), *experts.named_buffers()]
    others = [path for path, tensor in tensors if id(tensor) not in stacked]
    if others:
        raise ValueError(
            f"{name}.{others[0]} does not have one slice per expert, so expert_parallel_degree {degree} cannot shard "
            "this tensor; remove the adapter that contains the tensor, or set expert_parallel_degree to 1"
        )


def _stacked_tensors(experts: Experts) -> list[tuple[nn.Layer, str]]:
    """Return the tensors of experts and adapters that have one slice per expert, as (layer, name) pairs."""
    layers: list[nn.Layer] = [experts, *experts.sublayers()]
    found: list[tuple[nn.Layer, str]] = []
    for stacked in layers:
        if isinstance(stacked, _STACKS):
            found += [(stacked, name) for name in own_tensors(stacked)]
    for adapter in layers:
        axes = adapter.sharding_axes("experts") if isinstance(adapter, AdapterLayer) else {}
        for name in (name for name, axis in axes.items() if axis == 0):
            parent, _, leaf = name.rpartition(".")
            found.append((layer_at(adapter, parent), leaf))
    return [(layer, name) for layer, name in found if name in own_tensors(layer)]


class ExpertExchange:
    """Forward hooks of one expert layer: exchange rows between ranks before and after the layer.

    Args:
        experts: expert layer, already sharded over the tensor ranks.
        axis: mesh axis of the expert-parallel ranks.
    """

    def __init__(self, experts: Experts, axis: ProcessAxis) -> None:
        self._experts, self._axis, self._first_of_group = experts, axis, experts.first
        stacked = _stacked_tensors(experts)
        for layer, name in stacked:
            shard = shard_experts(layer, name, axis)
            experts.first, experts.num_local = shard.start, shard.stop - shard.start
        self._first, self._num_local = experts.first, experts.num_local
        self._own = [(layer, name, own_tensors(layer)[name]) for layer, name in stacked]
        self._is_gathered = False
        self._sent: tuple[ExpertRows, list[int], list[int]] | None = None
        experts.register_forward_pre_hook(self._dispatch)
        experts.register_forward_post_hook(self._combine)

    def _dispatch(self, layer: nn.Layer, inputs: tuple[paddle.Tensor, ...]) -> tuple[paddle.Tensor, ...]:
        """Send each row to the rank that holds its expert; return the received rows, weights and experts."""
        if self._is_gathered:
            return inputs
        x_TD, weights_TK, experts_TK = inputs
        rows = ExpertRows.sort(experts_TK.numpy(), self._num_local * self._axis.size, self._first_of_group)
        sent_PE = np.diff(rows.starts).reshape(self._axis.size, self._num_local)
        received_PE = all_to_all_rows(paddle.to_tensor(sent_PE), None, None, self._axis.group).numpy()
        sent, received = sent_PE.sum(axis=1).tolist(), received_PE.sum(axis=1).tolist()
        self._sent = rows, sent, received

        def exchange(x: paddle.Tensor) -> paddle.Tensor:
            return exchange_rows(x, sent, received, self._axis.group)

        choices_N = paddle.to_tensor(rows.choices, place=x_TD.place)
        weights_M1 = exchange(paddle.gather(weights_TK.flatten(), choices_N).unsqueeze(-1))
        experts_PE = np.tile(np.arange(self._num_local) + self._first, (self._axis.size, 1))
        experts_M1 = paddle.to_tensor(np.repeat(experts_PE, received_PE.ravel()).reshape(-1, 1), place=x_TD.place)
        return exchange(gather_rows(x_TD, rows)), weights_M1, experts_M1

    def _combine(self, layer: nn.Layer, inputs: Any, output_MD: paddle.Tensor) -> paddle.Tensor:
        """Send the expert outputs back; return each local token's sum over its experts, [T, D]."""
        if self._is_gathered:
            return output_MD
        assert self._sent is not None, "rows must be dispatched before the experts run"
        (rows, sent, received), self._sent = self._sent, None
        return sum_rows(exchange_rows(output_MD, received, sent, self._axis.group), rows)

    def gather(self) -> None:
        """Gather the tensors of all experts on every expert-parallel rank."""
        self._set_gathered(True, self._first_of_group, self._num_local * self._axis.size)
        for layer, name, own in self._own:
            if is_on_stage(own):
                full = self._axis.all_gather(own.detach(), 0)
                full.stop_gradient = own.stop_gradient
                set_own_tensor(layer, name, full)

    def release(self) -> None:
        """Free this rank's copies of the experts that other ranks hold."""
        self._set_gathered(False, self._first, self._num_local)
        for layer, name, own in self._own:
            set_own_tensor(layer, name, own)

    def _set_gathered(self, is_gathered: bool, first: int, number: int) -> None:
        self._is_gathered, self._experts.first, self._experts.num_local = is_gathered, first, number
