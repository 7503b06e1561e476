"""Sequence parallelism (arXiv:2205.05198): split hidden states over the tensor-parallel ranks between sharded layers.

Each rank holds the hidden states of a slice of the sequence, computes norms and residuals only for this slice, and
saves only this slice for the backward pass.

    embedding -> split -> [ norm -> all-gather -> attention or MLP -> reduce-scatter -> + ] x N -> norm -> gather

The all-gather before a sharded layer and the reduce-scatter after the layer replace the all-reduce of tensor
parallelism. The communication volume does not change. All slices have the same length: the end of the sequence is
padded, and the padding is removed after the all-gather.

Shapes: B batch, S positions, P positions per slice, D hidden.
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
        length: number of positions S, set by `split`. A later pipeline stage receives split hidden states and does not
            call `split`. `Pipeline` therefore sets `length` before each pass of a micro-batch.
    """

    def __init__(self, axis: ProcessAxis) -> None:
        self.axis, self.length = axis, 0

    def shard_shape(self, full_shape: Sequence[int]) -> list[int]:
        """Return the shape [B, P, D] of a rank's slice of hidden states [B, S, D]."""
        batch, length, width = full_shape
        return [batch, -(-length // self.axis.size), width]

    def split(self, full_BSD: paddle.Tensor) -> paddle.Tensor:
        """Return this rank's slice [B, P, D] of replicated hidden states [B, S, D]; the gradient is all-gathered."""
        self.length = full_BSD.shape[1]
        return _Scatter.apply(full_BSD, self.axis, _local_part)

    def gather_replicated(self, part_BPD: paddle.Tensor) -> paddle.Tensor:
        """Gather slices to [B, S, D] for replicated layers; the backward pass splits the gradient."""
        return _Gather.apply(part_BPD, self.length, self.axis, _local_part)

    def gather(self, part_BPD: paddle.Tensor) -> paddle.Tensor:
        """Gather slices to [B, S, D] for column-parallel layers; the backward pass reduce-scatters the gradient."""
        return _Gather.apply(part_BPD, self.length, self.axis, _reduce_scatter)

    def reduce_scatter(self, terms_BSD: paddle.Tensor) -> paddle.Tensor:
        """Reduce-scatter partial sums [B, S, D] to slices [B, P, D]; the backward pass all-gathers the gradient."""
        return _Scatter.apply(terms_BSD, self.axis, _reduce_scatter)


def apply_sequence_parallel(model: CausalLM, sequence: SequenceShards) -> None:
    """Split hidden states before the first decoder layer, and gather them after the last norm.

    Args:
        model: `CausalLM` whose layers were sharded with the same `sequence`.
        sequence: `SequenceShards` of the tensor-parallel ranks.

    Raises:
        ValueError: an adapter selects positions of the full sequence (ReFT), but a rank holds only a slice.
    """
    decoder = model.model
    if any(isinstance(layer, AdapterLayer) for layer in decoder.layers):
        raise ValueError("sequence_parallel: ReFT selects positions of the full sequence; set sequence_parallel: false")
    decoder.layers[0].register_forward_pre_hook(lambda layer, inputs: (sequence.split(inputs[0]), *inputs[1:]))
    decoder.norm.register_forward_post_hook(lambda layer, inputs, output: sequence.gather_replicated(output))
    partial = [*decoder.norm.parameters()]
    for layer in decoder.layers:
        layer.skips_unread = False  # `loss_positions` are indices into the full sequence
        partial += [parameter for norm in layer.norms() for parameter in norm.parameters()]
    for _, adapter in adapter_layers(decoder.layers):
        if not isinstance(adapter, LinearAdapter) and not adapter.shards_heads:  # adapter of a norm, attention or MLP
            partial += adapter.own_parameters()
    for parameter in partial:  # each rank sums these gradients over its slice only
        set_placement(parameter, needs_tp_reduce=True)


def _padded(full: paddle.Tensor, axis: ProcessAxis) -> tuple[paddle.Tensor, int]:
    """Return `full` with zeros appended, so that all ranks have slices of one length, and this length."""
    batch, length, width = full.shape
    size = -(-length // axis.size)
    missing = size * axis.size - length
    if missing:
        full = paddle.concat([full, paddle.zeros([batch, missing, width], full.dtype)], axis=1)
    return full, size


def _local_part(full: paddle.Tensor, axis: ProcessAxis) -> paddle.Tensor:
    """Return the slice of this rank, zero-padded to the common length.

    Zeros are appended before slicing, because Paddle leaves an empty slice on the CPU, and so a concatenation that
    begins with one.
    """
    full, size = _padded(full, axis)
    return full[:, axis.index * size : (axis.index + 1) * size].contiguous()


def _all_gather(part: paddle.Tensor, length: int, axis: ProcessAxis) -> paddle.Tensor:
    """Gather the slices of all ranks, concatenate them, and remove the padding."""
    parts: list[paddle.Tensor] = []
    dist.all_gather(parts, part.contiguous(), group=axis.group)
    return paddle.concat(parts, axis=1)[:, :length].contiguous()


def _reduce_scatter(terms: paddle.Tensor, axis: ProcessAxis) -> paddle.Tensor:
    """Sum `terms` over the ranks and return the slice of this rank, zero-padded to the common length."""
    terms, size = _padded(terms, axis)
    batch, _, width = terms.shape
    by_rank = terms.reshape([batch, axis.size, size, width]).transpose([1, 0, 2, 3]).flatten(0, 1).contiguous()
    part = paddle.empty([batch, size, width], terms.dtype)
    dist.reduce_scatter(part, cast("Any", by_rank), group=axis.group)  # Paddle's annotation allows only a list
    return part


class _Gather(PyLayer):
    """All-gather slices; in the backward pass, `to_part` computes the slice of this rank from the gradient."""

    @staticmethod
    def forward(ctx, part, length, axis, to_part):
        ctx.axis, ctx.to_part = axis, to_part
        return _all_gather(part, length, axis)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.to_part(gradient, ctx.axis)


class _Scatter(PyLayer):
    """Compute the slice of this rank with `to_part`; the backward pass all-gathers the gradient."""

    @staticmethod
    def forward(ctx, full, axis, to_part):
        ctx.length, ctx.axis = full.shape[1], axis
        return to_part(full, axis)

    @staticmethod
    def backward(ctx, gradient):
        return _all_gather(gradient, ctx.length, ctx.axis)
