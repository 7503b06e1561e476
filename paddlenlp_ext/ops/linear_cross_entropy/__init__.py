"""Fused cross entropy of an lm_head, which never holds the logits of the full batch.

    loss = sum over target positions of logsumexp(h W^T) - (h W^T)[label]

Only target positions (label != -100) enter the matmul, one chunk at a time. The gradients of a chunk are computed in
the forward pass, while its probabilities are in memory, and multiplied by the incoming scalar gradient in the backward
pass.

Shapes: T positions, R target positions of one chunk, D hidden size, V vocabulary size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.cpu.library import usable
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.linear_cross_entropy import cpu as cpp_products
from paddlenlp_ext.ops.linear_cross_entropy.cross_entropy import cross_entropy_
from paddlenlp_ext.utils.labels import IGNORED_LABEL


def linear_cross_entropy_reference(
    hidden_TD: paddle.Tensor, weight_VD: paddle.Tensor, labels_T: paddle.Tensor
) -> tuple[paddle.Tensor, int]:
    """Compute the loss from the logits of all positions, ignoring labels of -100."""
    is_target_T = labels_T != IGNORED_LABEL
    logits_TV = paddle.matmul(hidden_TD, weight_VD, transpose_y=True).astype("float32")
    labels_T = paddle.where(is_target_T, labels_T, paddle.zeros_like(labels_T))
    picked_T = paddle.take_along_axis(logits_TV, labels_T.unsqueeze(1), axis=1).squeeze(1)
    losses_T = (paddle.logsumexp(logits_TV, axis=1) - picked_T) * is_target_T.astype("float32")
    return losses_T.sum(), int(((logits_TV.argmax(axis=1) == labels_T) & is_target_T).sum())


def linear_cross_entropy(
    hidden_TD: paddle.Tensor,
    weight_VD: paddle.Tensor,
    labels_T: paddle.Tensor,
    chunk: int | None = None,
    implementation: str | None = None,
) -> tuple[paddle.Tensor, int]:
    """Return the summed cross entropy of `hidden @ weight^T` and the number of correct predictions.

    Args:
        hidden_TD: [T, D].
        weight_VD: [V, D]; its gradient is computed only if it is trainable.
        labels_T: [T]; -100 marks positions without a target.
        chunk: target positions per chunk; [chunk, V] is the largest tensor. None: 256, or 384 in C++ with bfloat16,
            which does not need a second tensor of this size for the rounded gradient.
        implementation: "native" or "reference"; None selects the best available one.

    Returns:
        The loss sum, an fp32 scalar (0 without targets), and the number of correct predictions.
    """
    target_positions_R = paddle.nonzero(labels_T != IGNORED_LABEL).flatten()
    labels_R = paddle.gather(labels_T, target_positions_R)
    hidden_RD = paddle.gather(hidden_TD, target_positions_R)
    if target_positions_R.shape[0] == 0:
        # Zero, but still a function of the inputs, so that their gradients are zeros rather than missing.
        return hidden_TD[:0].astype("float32").sum() + weight_VD[:0].astype("float32").sum(), 0
    with paddle.amp.auto_cast(enable=False):  # the sums here must stay in fp32; the matmuls follow the hidden states
        run = linear_cross_entropy_op.choose(hidden_RD, implementation)
        return run(hidden_RD, weight_VD, labels_R, chunk)


class _Products(NamedTuple):
    """Matmuls of an lm_head: weight conversion, chunk size, logits, cross entropy and both gradients.

    The cross entropy overwrites the logits with their gradient, in the dtype of the matmuls. The weight's gradient is
    added to that of the previous chunks.
    """

    prepare: Callable[[paddle.Tensor, paddle.dtype], paddle.Tensor]
    chunk: Callable[[paddle.Tensor], int]
    logits: Callable[[paddle.Tensor, paddle.Tensor], paddle.Tensor]
    cross_entropy: Callable[[paddle.Tensor, paddle.Tensor, bool, paddle.Tensor], tuple[paddle.Tensor, int]]
    hidden_gradient: Callable[[paddle.Tensor, paddle.Tensor], paddle.Tensor]
    weight_gradient: Callable[[paddle.Tensor, paddle.Tensor, paddle.Tensor, paddle.Tensor | None], paddle.Tensor]


def _sum_by_chunks(
    products: _Products, hidden_RD: paddle.Tensor, weight_VD: paddle.Tensor, labels_R: paddle.Tensor, chunk: int | None
) -> tuple[paddle.Tensor, int]:
    counter = _Counter()
    needs_grad = paddle.is_grad_enabled()
    loss = _LinearCrossEntropy.apply(hidden_RD, weight_VD, labels_R, chunk, needs_grad, counter, products)
    return loss, counter.correct


class _Counter:
    """Carry the number of correct predictions out of the PyLayer, whose outputs must be tensors."""

    correct = 0


class _LinearCrossEntropy(PyLayer):
    @staticmethod
    def forward(ctx, hidden_RD, weight_VD, labels_R, chunk, needs_grad, counter, products):
        hidden_needs_grad = needs_grad and not hidden_RD.stop_gradient
        weight_needs_grad = needs_grad and not weight_VD.stop_gradient
        loss = paddle.zeros([], "float32")
        hidden_gradients, weight_gradient = [], None
        ctx.weight_dtype, weight_VD = weight_VD.dtype, products.prepare(weight_VD, hidden_RD.dtype)
        chunk = products.chunk(weight_VD) if chunk is None else chunk
        for start in range(0, hidden_RD.shape[0], chunk):
            rows_RD, targets_R = hidden_RD[start : start + chunk], labels_R[start : start + chunk]
            logits_RV = _in_dtype(products.logits(rows_RD, weight_VD), paddle.float32)
            with_gradient = hidden_needs_grad or weight_needs_grad
            part, num_correct = products.cross_entropy(logits_RV, targets_R, with_gradient, weight_VD)
            loss += part
            counter.correct += num_correct
            if hidden_needs_grad:
                hidden_gradients.append(products.hidden_gradient(logits_RV, weight_VD))
            if weight_needs_grad:
                weight_gradient = products.weight_gradient(logits_RV, rows_RD, weight_VD, weight_gradient)
            del logits_RV  # frees the logits before the next chunk's are computed
        ctx.gradients = (paddle.concat(hidden_gradients) if hidden_needs_grad else None, weight_gradient)
        return loss

    @staticmethod
    def backward(ctx, loss_gradient):
        # Scaling in place saves memory, but allows a single backward pass only.
        parts, ctx.gradients = ctx.gradients, None
        assert parts is not None, "the backward pass of this loss has already run"
        hidden, weight = (None if part is None else part.multiply_(loss_gradient.astype(part.dtype)) for part in parts)
        # Rounded after scaling: a scale in bfloat16 would change the whole gradient by up to 0.4 %.
        return hidden, None if weight is None else _in_dtype(weight, ctx.weight_dtype), None


def _in_dtype(x: paddle.Tensor, dtype: paddle.dtype) -> paddle.Tensor:
    """Return `x` in `dtype` without the copy that a cast to its own dtype would make."""
    return x if x.dtype == dtype else x.astype(dtype)


def _paddle_hidden_gradient(gradient_RV: paddle.Tensor, weight_VD: paddle.Tensor) -> paddle.Tensor:
    return paddle.matmul(_in_dtype(gradient_RV, weight_VD.dtype), weight_VD)


def _paddle_weight_gradient(
    gradient_RV: paddle.Tensor, rows_RD: paddle.Tensor, weight_VD: paddle.Tensor, total_VD: paddle.Tensor | None
) -> paddle.Tensor:
    gradient_RV = _in_dtype(gradient_RV, rows_RD.dtype)
    part_VD = _in_dtype(paddle.matmul(gradient_RV, rows_RD, transpose_x=True), paddle.float32)
    return part_VD if total_VD is None else total_VD.add_(part_VD)


_PADDLE = _Products(
    prepare=_in_dtype,
    chunk=lambda _: 256,
    logits=functools.partial(paddle.matmul, transpose_y=True),
    cross_entropy=lambda logits_RV, targets_R, with_gradient, _: cross_entropy_(logits_RV, targets_R, with_gradient),
    hidden_gradient=_paddle_hidden_gradient,
    weight_gradient=_paddle_weight_gradient,
)
_CPP = _Products(
    cpp_products.prepare,
    cpp_products.chunk,
    cpp_products.logits,
    cpp_products.cross_entropy,
    cpp_products.hidden_gradient,
    cpp_products.weight_gradient,
)
linear_cross_entropy_op = DispatchedOp(
    "linear_cross_entropy",
    native=(functools.partial(_sum_by_chunks, _CPP), usable),
    reference=functools.partial(_sum_by_chunks, _PADDLE),
)
