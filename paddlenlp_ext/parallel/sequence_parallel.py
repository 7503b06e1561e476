"""Sequence parallelism: between the cut layers each tensor rank has a part of the positions.

Norms and residuals then work on a part each, and keep a part each for the backward pass (Korthikanti et al. 2022, arXiv
2205.05198). In front of the layers the stream is divided; what was one copy and one sum around each half of a layer
becomes a gathering and a scattered sum, which send the same bytes; behind the last norm the stream is whole again.

Parts are equal, the last ones padded; a gathered sequence has its own length, whatever the padding.
Shapes: B batch, S positions, P positions of one part, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.autograd import PyLayer

from paddlenlp_ext.parallel.mesh import ProcessAxis
from paddlenlp_ext.peft.layers import AdapterLayer, LinearAdapter, adapter_layers
from paddlenlp_ext.sharding_spec import set_placement


class SequenceShards:
    """How the positions of the pass at hand are divided.

    Args:
        axis: the tensor ranks.

    Attributes:
        length: how many positions there are. `split` finds out; where the stream comes in parts, as between the
            stages of a pipeline, who runs the pass says so, on the way back too: what is computed again needs it.
    """

    def __init__(self, axis: ProcessAxis) -> None:
        self.axis, self.length = axis, 0

    def shard_shape(self, whole: Sequence[int]) -> list[int]:
        """Of a stream [B, S, D] what a rank has: [B, P, D]."""
        batch, length, width = whole
        return [batch, -(-length // self.axis.size), width]

    def split(self, whole_BSD: paddle.Tensor) -> paddle.Tensor:
        """[B, S, D], the same on all ranks, to this rank's [B, P, D]."""
        self.length = whole_BSD.shape[1]
        return _Split.apply(whole_BSD, self.axis)

    def gather_replicated(self, part_BPD: paddle.Tensor) -> paddle.Tensor:
        """The reverse, for readers that do the same on every rank."""
        return _GatherReplicated.apply(part_BPD, self.length, self.axis)

    def gather(self, part_BPD: paddle.Tensor) -> paddle.Tensor:
        """The reverse, for readers that see a part of the features each: their gradients are summed."""
        return _Gather.apply(part_BPD, self.length, self.axis)

    def reduce_scatter(self, terms_BSD: paddle.Tensor) -> paddle.Tensor:
        """This rank's positions of the sum of all ranks' terms."""
        return _ReduceScatter.apply(terms_BSD, self.axis)


def apply_sequence_parallel(model: nn.Layer, sequence: SequenceShards) -> None:
    """Divide the stream in front of a decoder's layers and join it behind its last norm.

    Args:
        model: a `CausalLM` whose layers the tensor plan has cut with this `sequence`.
        sequence: theirs.

    Raises:
        ValueError: an adapter picks positions out of the stream, of which a rank has only some.
    """
    decoder = model.model
    if any(isinstance(layer, AdapterLayer) for layer in decoder.layers):
        raise ValueError("sequence_parallel: ReFT picks positions of whole sequences; set sequence_parallel: false")
    decoder.layers[0].register_forward_pre_hook(lambda layer, inputs: (sequence.split(inputs[0]), *inputs[1:]))
    decoder.norm.register_forward_post_hook(lambda layer, inputs, output: sequence.gather_replicated(output))
    seen = [*decoder.norm.parameters()]
    for layer in decoder.layers:
        seen += [*layer.input_layernorm.parameters(), *layer.post_attention_layernorm.parameters()]
    for _, adapter in adapter_layers(decoder.layers):
        if not isinstance(adapter, LinearAdapter) and not adapter.shards_heads:  # beside or behind a half of a layer
            seen += [parameter for name, parameter in adapter.named_parameters() if not name.startswith("base.")]
    for parameter in seen:
        set_placement(parameter, needs_tp_reduce=True)  # a rank sees only some of the positions


def _part(whole: paddle.Tensor, axis: ProcessAxis) -> paddle.Tensor:
    """This rank's positions, zeros behind the last."""
    batch, length, width = whole.shape
    size = -(-length // axis.size)
    part = whole[:, axis.index * size : (axis.index + 1) * size]
    missing = size - part.shape[1]
    if missing:
        part = paddle.concat([part, paddle.zeros([batch, missing, width], whole.dtype)], axis=1)
    return part.contiguous()


def _all_gather(part: paddle.Tensor, length: int, axis: ProcessAxis) -> paddle.Tensor:
    parts: list[paddle.Tensor] = []
    dist.all_gather(parts, part.contiguous(), group=axis.group)
    return paddle.concat(parts, axis=1)[:, :length].contiguous()


def _reduce_scatter(terms: paddle.Tensor, axis: ProcessAxis) -> paddle.Tensor:
    batch, length, width = terms.shape
    size = -(-length // axis.size)
    missing = size * axis.size - length
    if missing:
        terms = paddle.concat([terms, paddle.zeros([batch, missing, width], terms.dtype)], axis=1)
    by_rank = terms.reshape([batch, axis.size, size, width]).transpose([1, 0, 2, 3]).flatten(0, 1).contiguous()
    part = paddle.empty([batch, size, width], terms.dtype)
    dist.reduce_scatter(part, by_rank, group=axis.group)
    return part


class _Split(PyLayer):
    @staticmethod
    def forward(ctx, whole, axis):
        ctx.length, ctx.axis = whole.shape[1], axis
        return _part(whole, axis)

    @staticmethod
    def backward(ctx, gradient):
        return _all_gather(gradient, ctx.length, ctx.axis)


class _GatherReplicated(PyLayer):
    @staticmethod
    def forward(ctx, part, length, axis):
        ctx.axis = axis
        return _all_gather(part, length, axis)

    @staticmethod
    def backward(ctx, gradient):
        return _part(gradient, ctx.axis)


class _Gather(PyLayer):
    @staticmethod
    def forward(ctx, part, length, axis):
        ctx.axis = axis
        return _all_gather(part, length, axis)

    @staticmethod
    def backward(ctx, gradient):
        return _reduce_scatter(gradient, ctx.axis)


class _ReduceScatter(PyLayer):
    @staticmethod
    def forward(ctx, terms, axis):
        ctx.length, ctx.axis = terms.shape[1], axis
        return _reduce_scatter(terms, axis)

    @staticmethod
    def backward(ctx, gradient):
        return _all_gather(gradient, ctx.length, ctx.axis)
