"""Recurrences with the Triton kernels in kernels/, each as a single autograd node.

Only the inputs are saved; the backward pass computes the states between the chunks again. Products have operands in the
dtype of the queries.

Tested in Triton's interpreter on the CPU (tests/ops/gated_delta_rule/test_triton.py), except for the launch itself.
Not yet run on a GPU with Paddle.

Shapes: T positions, R documents, G key heads, N heads, H key dimension, E value dimension, M chunks, C positions of a
chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.gated_delta_rule.reference import NORM_EPSILON
from paddlenlp_ext.ops.tensor_utils import contiguous, in_dtype, needs_grad
from paddlenlp_ext.ops.triton_utils.launch import empty_beside, launch

if TYPE_CHECKING:
    from paddlenlp_ext.ops.gated_delta_rule.kernels.chunk_lists import ChunkLists
    from paddlenlp_ext.ops.gated_delta_rule.kernels.inputs import Problem
    from paddlenlp_ext.ops.gated_delta_rule.kernels.passes import Library


def triton_recurrence(
    inputs: Sequence[paddle.Tensor], layout: AttentionLayout, initial_RNHE: paddle.Tensor | None
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the outputs [T, N, E] in the dtype of v, and the states after the documents [R, N, H, E].

    Args:
        inputs: q and k [T, G, H] of one dtype, v [T, N, E], decays [T, N], and in the gated delta rule beta [T, N]. The
            gated delta rule normalizes q and k.
        layout: documents of the batch.
        initial_RNHE: states before the documents; None for zeros.
    """
    q, k, v, decay, *beta = inputs
    states = [] if initial_RNHE is None else [initial_RNHE]
    in_float32 = (in_dtype(x, paddle.float32) for x in (decay, *beta, *states))
    tensors = [contiguous(x) for x in (q, in_dtype(k, q.dtype), v, *in_float32)]
    _check_shapes(layout, [x.shape for x in tensors], bool(beta))
    lists = _lists_on(q, layout)
    if needs_grad(*tensors):
        return _Recurrence.apply(lists, bool(beta), *tensors)
    return _forward(lists, bool(beta), tensors)


class _Recurrence(PyLayer):
    @staticmethod
    def forward(ctx, lists, has_beta, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.lists, ctx.has_beta, ctx.needs_grad = lists, has_beta, [not x.stop_gradient for x in tensors]
        return _forward(lists, has_beta, tensors)

    @staticmethod
    def backward(ctx, o_gradient_TNE, final_gradient_RNHE):
        from paddlenlp_ext.ops.gated_delta_rule.kernels.passes import backward

        tensors, has_beta = ctx.saved_tensor(), ctx.has_beta
        of_outputs = contiguous(o_gradient_TNE), contiguous(final_gradient_RNHE)
        *of_keys, of_v, of_decay, of_beta, of_initial = backward(
            _library(), _problem(ctx.lists, has_beta, tensors), *of_outputs
        )
        q, k = (in_dtype(x[0] if len(x) == 1 else x.sum(0), tensors[0].dtype) for x in of_keys)
        if has_beta:
            q, k = _scaled(tensors[0], tensors[0].shape[2] ** -0.5, q), _scaled(tensors[1], 1.0, k)
        gradients = q, k, of_v, of_decay, *([of_beta] if has_beta else []), of_initial
        # Paddle rejects gradients for frozen inputs. Without initial states, `gradients` has one more.
        return tuple(x if needed else None for x, needed in zip(gradients, ctx.needs_grad, strict=False))


def _check_shapes(layout: AttentionLayout, shapes: Sequence[Sequence[int]], has_beta: bool) -> None:
    """Check the shapes, because kernels would read past the end of tensors."""
    (count, groups, key_dim), (_, heads, value_dim) = shapes[0], shapes[2]
    assert count == layout.num_positions and heads % groups == 0, f"{shapes}, {layout.num_positions} positions"
    states = [len(layout.documents()[0]), heads, key_dim, value_dim]
    others = [[count, heads]] * (1 + has_beta)
    expected = [shapes[0], shapes[0], [count, heads, value_dim], *others, states]
    assert list(shapes) == expected[: len(shapes)], f"{shapes}, expected {expected}"


def _lists_on(q: paddle.Tensor, layout: AttentionLayout) -> ChunkLists:
    """Return the chunks of a layout with tensors on the device of q; they are copied once per layout."""
    from paddlenlp_ext.ops.gated_delta_rule.kernels.chunk_lists import chunk_lists
    from paddlenlp_ext.ops.gated_delta_rule.kernels.inputs import chunk_size

    starts, lengths = layout.documents()
    size = chunk_size(q.element_size(), int(lengths.max()))

    def make() -> ChunkLists:
        lists = chunk_lists(starts, lengths, layout.parents(), size)
        return lists.converted(lambda array: paddle.to_tensor(array, place=q.place))

    return layout.cached(("Triton chunks", size, str(q.place)), make)


def _library() -> Library:
    from paddlenlp_ext.ops.gated_delta_rule.kernels.passes import Library

    def empty(x: paddle.Tensor, shape: Sequence[int], in_float32: bool) -> paddle.Tensor:
        return empty_beside(x, shape, paddle.float32 if in_float32 else None)

    return Library(launch, empty)


def _forward(
    lists: ChunkLists, has_beta: bool, tensors: Sequence[paddle.Tensor]
) -> tuple[paddle.Tensor, paddle.Tensor]:
    from paddlenlp_ext.ops.gated_delta_rule.kernels.passes import forward

    return forward(_library(), _problem(lists, has_beta, tensors))


def _problem(lists: ChunkLists, has_beta: bool, tensors: Sequence[paddle.Tensor]) -> Problem:
    """Return the inputs of the kernels; the gated delta rule has normalized queries and keys."""
    from paddlenlp_ext.ops.gated_delta_rule.kernels.inputs import Problem

    q, k, v, decay, *rest = tensors
    if has_beta:
        q, k = _scaled(q, q.shape[2] ** -0.5), _scaled(k, 1.0)
    beta = rest.pop(0) if has_beta else None
    return Problem(q, k, v, decay, beta, rest[0] if rest else None, lists)


def _scaled(x: paddle.Tensor, scale: float, gradient: paddle.Tensor | None = None) -> paddle.Tensor:
    """Return the vectors with norm `scale`; with the gradient of these vectors, return the gradient of x."""
    from paddlenlp_ext.ops.gated_delta_rule.kernels.unit_vectors import launch_unit_vectors

    out = empty_beside(x)
    launch_unit_vectors(launch, x, out, scale, NORM_EPSILON, gradient)
    return out
