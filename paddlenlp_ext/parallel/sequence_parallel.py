"""Sequence parallelism: between sharded layers each tensor-parallel rank holds a slice of the sequence.

Each rank computes norms and residuals for its slice only, and saves only this slice for the backward pass
(arXiv:2205.05198).

    embedding -> split -> [ norm -> all-gather -> attention or MLP -> reduce-scatter -> + ] x N -> norm -> gather

An all-gather and a reduce-scatter replace the identity and the all-reduce of tensor parallelism, with the same
communication volume. Slices have equal lengths: the last slice is padded, and gathering removes the padding.

Shapes: B batch, S positions, P positions of a slice, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer

from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.parallel.mesh import ProcessAxis
from paddlenlp_ext.peft.layers import AdapterLayer, LinearAdapter, adapter_layers
from paddlenlp_ext.sharding_spec import set_placement


class SequenceShards:
    """Split the sequence of the current micro-batch over the tensor-parallel ranks.

    Args:
        axis: mesh axis of the tensor-parallel ranks.

    Attributes:
        length: number of positions S, set by `split`. Later pipeline stages receive hidden states that are already
            split; there, the caller sets it before the forward pass, and before the backward pass for recomputation.
    """

    def __init__(self, axis: ProcessAxis) -> None:
        self.axis, self.length = axis, 0

    def shard_shape(self, full_shape: Sequence[int]) -> list[int]:
        """Return the shape [B, P, D] of a rank's slice of hidden states [B, S, D]."""
        batch, length, width = full_shape
        return [batch, -(-length // self.axis.size), width]

    def split(self, full_BSD: paddle.Tensor) -> paddle.Tensor:
        """Return this rank's slice [B, P, D] of a replicated [B, S, D]; the backward pass gathers the gradients."""
        self.length = full_BSD.shape[1]
        return _Scatter.apply(full_BSD, self.axis, _local_part)

    def gather_replicated(self, part_BPD: paddle.Tensor) -> paddle.Tensor:
        """Gather slices to [B, S, D] for layers that compute the same on all ranks; the backward pass splits."""
        return _Gather.apply(part_BPD, self.length, self.axis, _local_part)

    def gather(self, part_BPD: paddle.Tensor) -> paddle.Tensor:
        """Gather slices to [B, S, D] for column-parallel layers; the backward pass reduce-scatters."""
        return _Gather.apply(part_BPD, self.length, self.axis, _reduce_scatter)

    def reduce_scatter(self, terms_BSD: paddle.Tensor) -> paddle.Tensor:
        """Reduce-scatter [B, S, D] and return this rank's slice [B, P, D]; the backward pass gathers."""
        return _Scatter.apply(terms_BSD, self.axis, _reduce_scatter)


def apply_sequence_parallel(model: CausalLM, sequence: SequenceShards) -> None:
    """Split hidden states before the first decoder layer, and gather them after the last norm.

    Args:
        model: `CausalLM` whose layers were sharded with the same `sequence`.
        sequence: split of the sequence.

    Raises:
        ValueError: an adapter selects positions of the full sequence, but a rank holds only a slice.
    """
    decoder = model.model
    if any(isinstance(layer, AdapterLayer) for layer in decoder.layers):
        raise ValueError("sequence_parallel: ReFT selects positions of the full sequence; set sequence_parallel: false")
    decoder.layers[0].register_forward_pre_hook(lambda layer, inputs: (sequence.split(inputs[0]), *inputs[1:]))
    decoder.norm.register_forward_post_hook(lambda layer, inputs, output: sequence.gather_replicated(output))
    partial = [*decoder.norm.parameters()]
    for layer in decoder.layers:
        partial += [parameter for norm in layer.norms() for parameter in norm.parameters()]
    for _, adapter in adapter_layers(decoder.layers):
        if not isinstance(adapter, LinearAdapter) and not adapter.shards_heads:  # adapter parallel to attention or MLP
            partial += adapter.own_parameters()
    for parameter in partial:  # a rank computes their gradients only over its positions
        set_placement(parameter, needs_tp_reduce=True)


def _local_part(full: paddle.Tensor, axis: ProcessAxis) -> paddle.Tensor:
    """Return this rank's positions, zero-padded to the common length."""
    batch, length, width = full.shape
    size = -(-length // axis.size)
    part = full[:, axis.index * size : (axis.index + 1) * size]
    missing = size - part.shape[1]
    if missing:
        part = paddle.concat([part, paddle.zeros([batch, missing, width], full.dtype)], axis=1)
    return part.contiguous()


def _all_gather(part: paddle.Tensor, length: int, axis: ProcessAxis) -> paddle.Tensor:
    """Return the slices of all ranks, concatenated and without padding."""
    parts: list[paddle.Tensor] = []
    dist.all_gather(parts, part.contiguous(), group=axis.group)
    return paddle.concat(parts, axis=1)[:, :length].contiguous()


def _reduce_scatter(terms: paddle.Tensor, axis: ProcessAxis) -> paddle.Tensor:
    """Return this rank's positions of the sum over the ranks, zero-padded to the common length."""
    batch, length, width = terms.shape
    size = -(-length // axis.size)
    missing = size * axis.size - length
    if missing:
        terms = paddle.concat([terms, paddle.zeros([batch, missing, width], terms.dtype)], axis=1)
    by_rank = terms.reshape([batch, axis.size, size, width]).transpose([1, 0, 2, 3]).flatten(0, 1).contiguous()
    part = paddle.empty([batch, size, width], terms.dtype)
    dist.reduce_scatter(part, cast("Any", by_rank), group=axis.group)  # Paddle's annotation lacks one tensor
    return part


class _Gather(PyLayer):
    """All-gather slices; the backward pass returns this rank's slice of the gradient, computed by `to_part`."""

    @staticmethod
    def forward(ctx, part, length, axis, to_part):
        ctx.axis, ctx.to_part = axis, to_part
        return _all_gather(part, length, axis)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.to_part(gradient, ctx.axis)


class _Scatter(PyLayer):
    """Return this rank's slice, computed by `to_part`; the backward pass all-gathers the gradient."""

    @staticmethod
    def forward(ctx, full, axis, to_part):
        ctx.length, ctx.axis = full.shape[1], axis
        return to_part(full, axis)

    @staticmethod
    def backward(ctx, gradient):
        return _all_gather(gradient, ctx.length, ctx.axis)
