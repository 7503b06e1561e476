"""Rotary position embedding of queries and keys, with QK norms, in one launch of a Triton kernel.

The cos and sin tables are saved for the backward pass; with norms, the inputs are saved too.

The outputs are new tensors, although the kernels could run in place. A write through an address does not increase
Paddle's version counter, so Paddle would not detect a backward pass through an overwritten tensor. Hooks that save the
outputs of projections or their gradients would read overwritten values. Running in place would hardly lower the peak
memory: layers free their projections before attention runs (nn/attention.py), and the peak is in the feed-forward
block.

Tested in Triton's interpreter on the CPU (tests/ops/rope/test_triton.py), except for the launch itself. Not yet run on
a GPU with Paddle.

Shapes: B batch, S sequence, N query heads, K key heads, H head dimension, R rotated channels of a head.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.rope.reference import HeadNorms
from paddlenlp_ext.ops.tensor_utils import needs_grad
from paddlenlp_ext.ops.triton_utils.launch import common_stride, empty_beside, launch

if TYPE_CHECKING:
    from paddlenlp_ext.ops.rope.kernels import Heads


def rope_triton(
    x_BSNH: paddle.Tensor, cos_BSR: paddle.Tensor, sin_BSR: paddle.Tensor, interleaved: bool = False
) -> paddle.Tensor:
    """Rotate every head of x, which may be a slice of a wider tensor."""
    return _rotate((x_BSNH,), (cos_BSR, sin_BSR), interleaved)[0]


def rotate_heads_triton(
    q_BSNH: paddle.Tensor,
    k_BSKH: paddle.Tensor,
    cos_BSR: paddle.Tensor,
    sin_BSR: paddle.Tensor,
    interleaved: bool = False,
    norms: HeadNorms | None = None,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Rotate queries and keys in one launch; if `norms` is given, also normalize each head."""
    assert q_BSNH.shape[-1] == k_BSKH.shape[-1], f"heads of {q_BSNH.shape[-1]} and {k_BSKH.shape[-1]} channels"
    if norms is None:
        q_BSNH, k_BSKH = _rotate((q_BSNH, k_BSKH), (cos_BSR, sin_BSR), interleaved)
        return q_BSNH, k_BSKH
    heads, tables = (q_BSNH, k_BSKH), _tables((q_BSNH, k_BSKH), (cos_BSR, sin_BSR))
    norms = dataclasses.replace(norms, q_weight=norms.q_weight.contiguous(), k_weight=norms.k_weight.contiguous())
    weights = norms.q_weight, norms.k_weight
    assert all(each.shape == q_BSNH.shape[-1:] for each in weights), "a norm weight must have the size of a head"
    if needs_grad(*heads, *weights):
        return _NormRope.apply(*heads, *weights, *tables, norms, interleaved)
    q_BSNH, k_BSKH = _turned(heads, tables, interleaved, norms=norms)
    return q_BSNH, k_BSKH


def _rotate(
    heads: tuple[paddle.Tensor, ...], tables: tuple[paddle.Tensor, paddle.Tensor], interleaved: bool
) -> tuple[paddle.Tensor, ...]:
    tables = _tables(heads, tables)
    if needs_grad(*heads):
        return _Rope.apply(*tables, interleaved, *heads)
    return _turned(heads, tables, interleaved)


def _tables(
    heads: tuple[paddle.Tensor, ...], tables: tuple[paddle.Tensor, paddle.Tensor]
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Check the shapes of the cos and sin tables, and return contiguous tables."""
    (batch, length, _, head_dim), rotary_dim = heads[0].shape, tables[0].shape[-1]
    assert all(each.shape == [batch, length, rotary_dim] for each in tables), (
        "the tables must have the same batch size and length as x"
    )
    assert rotary_dim <= head_dim and rotary_dim % 2 == 0, f"{rotary_dim} of {head_dim} channels cannot be rotated"
    return tables[0].contiguous(), tables[1].contiguous()


class _Rope(PyLayer):
    @staticmethod
    def forward(ctx, cos_BSR, sin_BSR, interleaved, *heads):
        ctx.save_for_backward(cos_BSR, sin_BSR)
        ctx.interleaved, ctx.grads_needed = interleaved, [not each.stop_gradient for each in heads]
        return _turned(heads, (cos_BSR, sin_BSR), interleaved)

    @staticmethod
    def backward(ctx, *gradients):
        turned = _turned(gradients, ctx.saved_tensor(), ctx.interleaved, back=True)
        # Paddle rejects gradients for frozen inputs.
        return None, None, *(each if needed else None for each, needed in zip(turned, ctx.grads_needed, strict=True))


class _NormRope(PyLayer):
    @staticmethod
    def forward(ctx, q_BSNH, k_BSKH, q_weight_H, k_weight_H, cos_BSR, sin_BSR, norms, interleaved):
        inputs = q_BSNH, k_BSKH, q_weight_H, k_weight_H
        ctx.save_for_backward(*inputs, cos_BSR, sin_BSR)
        ctx.interleaved, ctx.grads_needed = interleaved, [not each.stop_gradient for each in inputs]
        ctx.options = norms.epsilon, norms.offset, norms.after_rotation
        return _turned((q_BSNH, k_BSKH), (cos_BSR, sin_BSR), interleaved, norms=norms)

    @staticmethod
    def backward(ctx, *gradients):
        from paddlenlp_ext.ops.rope.kernels import launch_norm_rope_backward, partial_rows
        from paddlenlp_ext.ops.triton_utils.column_sums import launch_column_sums

        q_BSNH, k_BSKH, q_weight_H, k_weight_H, *tables = ctx.saved_tensor()
        cos_sin, needed = (tables[0], tables[1]), ctx.grads_needed
        results = empty_beside(q_BSNH), empty_beside(k_BSKH)
        rows, partials = partial_rows(q_BSNH, k_BSKH, tables[0]), None
        if needed[2] or needed[3]:
            partials = empty_beside(q_BSNH, [sum(rows), q_BSNH.shape[-1]], paddle.float32)
        launch_norm_rope_backward(
            launch,
            (gradients[0].contiguous(), gradients[1].contiguous()),
            _heads(q_BSNH),
            _heads(k_BSKH),
            cos_sin,
            results,
            ctx.interleaved,
            norms=HeadNorms(q_weight_H, k_weight_H, *ctx.options),
            partials=partials,
        )
        of_weights = [empty_beside(q_weight_H), empty_beside(k_weight_H)]
        for index, (first, count) in enumerate(((0, rows[0]), rows)):
            if needed[2 + index]:
                launch_column_sums(launch, partials, of_weights[index], first, count)
        # Paddle rejects gradients for frozen inputs.
        of_inputs = zip((*results, *of_weights), needed, strict=True)
        return *(each if is_needed else None for each, is_needed in of_inputs), None, None


def _turned(
    heads: tuple[paddle.Tensor, ...],
    tables: tuple[paddle.Tensor, ...],
    interleaved: bool,
    norms: HeadNorms | None = None,
    back: bool = False,
) -> tuple[paddle.Tensor, ...]:
    from paddlenlp_ext.ops.rope.kernels import launch_rope

    outs = tuple(empty_beside(each) for each in heads)
    q, k = _heads(heads[0]), _heads(heads[1]) if len(heads) > 1 else None
    launch_rope(launch, q, k, (tables[0], tables[1]), (outs[0], outs[-1]), interleaved, norms=norms, back=back)
    return outs


def _heads(x_BSNH: paddle.Tensor) -> Heads:
    """Return the tensor with its token and head strides; copy the tensor if the tokens are not evenly spaced."""
    from paddlenlp_ext.ops.rope.kernels import Heads

    stride = common_stride(x_BSNH.shape[:2], x_BSNH.strides[:2]) if x_BSNH.strides[-1] == 1 else None
    if stride is None:
        x_BSNH = x_BSNH.contiguous()
        stride = x_BSNH.shape[2] * x_BSNH.shape[3]
    return Heads(x_BSNH, stride, x_BSNH.strides[2])
