"""Losses of target positions by chunks, whose matmuls are those of a backend.

Shapes: R target positions, or those of one chunk; D hidden size, V vocabulary size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.linear_cross_entropy import cpu
from paddlenlp_ext.ops.linear_cross_entropy.cross_entropy import cross_entropy_
from paddlenlp_ext.utils.labels import IGNORED_LABEL


@dataclass(frozen=True)
class Products:
    """Matmuls of an lm_head: weight conversion, chunk size, logits, cross entropy and both gradients.

    The cross entropy of the logits, which a soft-cap may bound, overwrites them with their gradient, in the dtype of
    the matmuls. The weight's gradient is added to that of the previous chunks. `complete_hidden` sums the gradient of
    the hidden states in place over the processes that have a part of the weight.
    """

    prepare: Callable[[paddle.Tensor, paddle.dtype], paddle.Tensor]
    chunk: Callable[[paddle.Tensor], int]
    logits: Callable[[paddle.Tensor, paddle.Tensor], paddle.Tensor]
    cross_entropy: Callable[
        [paddle.Tensor, paddle.Tensor, bool, paddle.Tensor, float | None], tuple[paddle.Tensor, int]
    ]
    hidden_gradient: Callable[[paddle.Tensor, paddle.Tensor], paddle.Tensor]
    weight_gradient: Callable[[paddle.Tensor, paddle.Tensor, paddle.Tensor, paddle.Tensor | None], paddle.Tensor]
    complete_hidden: Callable[[paddle.Tensor], object] = lambda _: None


Losses = Callable[[paddle.Tensor, paddle.Tensor, paddle.Tensor, int | None, bool], tuple[paddle.Tensor, int]]
"""Function with the arguments of `losses_by_chunks` after the first."""


def sum_of_losses(
    losses: Losses, hidden_TD: paddle.Tensor, weight_VD: paddle.Tensor, labels_T: paddle.Tensor, chunk: int | None
) -> tuple[paddle.Tensor, int]:
    """Return the sum of the target positions' losses, an fp32 scalar, and the number of correct predictions."""
    positions_R = _target_positions(labels_T)
    if positions_R.shape[0] == 0:
        return _zero(hidden_TD, weight_VD), 0
    with paddle.amp.auto_cast(enable=False):  # the sums here must stay in fp32; the matmuls follow the hidden states
        rows = paddle.gather(hidden_TD, positions_R), weight_VD, paddle.gather(labels_T, positions_R)
        losses_R, num_correct = losses(*rows, chunk, True)
        # In double precision: on the CPU Paddle sums sequentially.
        return losses_R.astype("float64").sum().astype("float32"), num_correct


def logprobs_of_losses(
    losses: Losses, hidden_TD: paddle.Tensor, weight_VD: paddle.Tensor, labels_T: paddle.Tensor, chunk: int | None
) -> paddle.Tensor:
    """Return the log-probability of each label, fp32 [T]; 0 at positions without a target."""
    positions_R, zeros_T = _target_positions(labels_T), paddle.zeros([labels_T.shape[0]], "float32")
    if positions_R.shape[0] == 0:
        return zeros_T + _zero(hidden_TD, weight_VD)
    with paddle.amp.auto_cast(enable=False):
        rows = paddle.gather(hidden_TD, positions_R), weight_VD, paddle.gather(labels_T, positions_R)
        losses_R, _ = losses(*rows, chunk, False)
        return paddle.scatter(zeros_T, positions_R, -losses_R)


def _target_positions(labels_T: paddle.Tensor) -> paddle.Tensor:
    return paddle.nonzero(labels_T != IGNORED_LABEL).flatten()


def _zero(hidden_TD: paddle.Tensor, weight_VD: paddle.Tensor) -> paddle.Tensor:
    """Return zero as a function of the inputs, so that their gradients are zeros rather than missing."""
    return hidden_TD[:0].astype("float32").sum() + weight_VD[:0].astype("float32").sum()


def losses_by_chunks(
    products: Products,
    hidden_RD: paddle.Tensor,
    weight_VD: paddle.Tensor,
    labels_R: paddle.Tensor,
    chunk: int | None,
    is_summed: bool,
    softcap: float | None = None,
) -> tuple[paddle.Tensor, int]:
    """Return the cross entropy of each position, fp32 [R], and the number of correct predictions.

    With `is_summed` the caller sums the losses, so that all have the same gradient. `softcap` bounds the logits.
    """
    counter = _Counter()
    needs_grad = paddle.is_grad_enabled()
    options = chunk, needs_grad, counter, products, is_summed, softcap
    losses_R = _Losses.apply(hidden_RD, weight_VD, labels_R, *options)
    return losses_R, counter.correct


class _Counter:
    """Carry the number of correct predictions out of the PyLayer, whose outputs must be tensors."""

    correct = 0


class _Losses(PyLayer):
    """Gradients of a chunk are computed in the forward pass, while its probabilities are in memory.

    The backward pass multiplies them by the gradients of the losses. A weight's gradient is a sum over positions, so
    this is possible only if all losses have the same gradient; otherwise the backward pass computes the chunks again.
    """

    @staticmethod
    def forward(ctx, hidden_RD, weight_VD, labels_R, chunk, needs_grad, counter, products, is_summed, softcap):
        ctx.wants = needs_grad and not hidden_RD.stop_gradient, needs_grad and not weight_VD.stop_gradient
        ctx.products, ctx.softcap, ctx.weight_dtype = products, softcap, weight_VD.dtype
        operand_VD = products.prepare(weight_VD, hidden_RD.dtype)
        ctx.chunk = products.chunk(operand_VD) if chunk is None else chunk
        ctx.is_recomputed = ctx.wants[1] and not is_summed
        if ctx.is_recomputed:
            ctx.save_for_backward(hidden_RD, weight_VD, labels_R)
        losses, total = [], _Gradients(products, (False, False) if ctx.is_recomputed else ctx.wants, softcap)
        for rows_RD, targets_R in _chunks(hidden_RD, labels_R, ctx.chunk):
            losses_R, num_correct = total.add(rows_RD, targets_R, operand_VD)
            losses.append(losses_R)
            counter.correct += num_correct
        ctx.gradients = total.result()
        return paddle.concat(losses)

    @staticmethod
    def backward(ctx, gradients_R):
        if ctx.is_recomputed:
            hidden_RD, weight_VD, labels_R = ctx.saved_tensor()
            operand_VD = ctx.products.prepare(weight_VD, hidden_RD.dtype)
            total = _Gradients(ctx.products, ctx.wants, ctx.softcap)
            for start, (rows_RD, targets_R) in enumerate(_chunks(hidden_RD, labels_R, ctx.chunk)):
                factors_R = gradients_R[start * ctx.chunk : (start + 1) * ctx.chunk]
                total.add(rows_RD, targets_R, operand_VD, factors_R)
            hidden, weight = total.result()
        else:
            # Scaling in place saves memory, but allows a single backward pass only.
            parts, ctx.gradients = ctx.gradients, None
            assert parts is not None, "the backward pass of this loss has already run"
            hidden, weight = parts
            if weight is not None:  # the losses are summed: their gradients are equal
                weight.multiply_(gradients_R[0].astype(weight.dtype))
        if hidden is not None:
            hidden.multiply_(gradients_R.unsqueeze(1).astype(hidden.dtype))
            ctx.products.complete_hidden(hidden)
        # Rounded after scaling: a scale in bfloat16 would change the whole gradient by up to 0.4 %.
        return hidden, None if weight is None else in_dtype(weight, ctx.weight_dtype), None


class _Gradients:
    """Gradients of hidden states and weight (each if wanted), accumulated by chunks."""

    def __init__(self, products: Products, wants: tuple[bool, bool], softcap: float | None) -> None:
        self._products, self._wants, self._softcap = products, wants, softcap
        self._hidden: list[paddle.Tensor] = []
        self._weight: paddle.Tensor | None = None

    def add(
        self,
        rows_RD: paddle.Tensor,
        targets_R: paddle.Tensor,
        weight_VD: paddle.Tensor,
        factors_R: paddle.Tensor | None = None,
    ) -> tuple[paddle.Tensor, int]:
        """Add a chunk; return its losses [R] and correct predictions. `factors_R` scale the weight's gradient."""
        products, (wants_hidden, wants_weight) = self._products, self._wants
        logits_RV = in_dtype(products.logits(rows_RD, weight_VD), paddle.float32)
        losses_R, num_correct = products.cross_entropy(logits_RV, targets_R, any(self._wants), weight_VD, self._softcap)
        if wants_hidden:
            self._hidden.append(products.hidden_gradient(logits_RV, weight_VD))
        if wants_weight:
            scaled_RD = rows_RD if factors_R is None else rows_RD * factors_R.unsqueeze(1).astype(rows_RD.dtype)
            self._weight = products.weight_gradient(logits_RV, scaled_RD, weight_VD, self._weight)
        return losses_R, num_correct

    def result(self) -> tuple[paddle.Tensor | None, paddle.Tensor | None]:
        return paddle.concat(self._hidden) if self._hidden else None, self._weight


def _chunks(
    hidden_RD: paddle.Tensor, labels_R: paddle.Tensor, chunk: int
) -> Iterator[tuple[paddle.Tensor, paddle.Tensor]]:
    for start in range(0, hidden_RD.shape[0], chunk):
        yield hidden_RD[start : start + chunk], labels_R[start : start + chunk]


def in_dtype(x: paddle.Tensor, dtype: paddle.dtype) -> paddle.Tensor:
    """Return `x` in `dtype` without the copy that a cast to its own dtype would make."""
    return x if x.dtype == dtype else x.astype(dtype)


def _hidden_gradient(gradient_RV: paddle.Tensor, weight_VD: paddle.Tensor) -> paddle.Tensor:
    return paddle.matmul(in_dtype(gradient_RV, weight_VD.dtype), weight_VD)


def _weight_gradient(
    gradient_RV: paddle.Tensor, rows_RD: paddle.Tensor, weight_VD: paddle.Tensor, total_VD: paddle.Tensor | None
) -> paddle.Tensor:
    gradient_RV = in_dtype(gradient_RV, rows_RD.dtype)
    part_VD = in_dtype(paddle.matmul(gradient_RV, rows_RD, transpose_x=True), paddle.float32)
    return part_VD if total_VD is None else total_VD.add_(part_VD)


PADDLE = Products(
    prepare=in_dtype,
    chunk=lambda _: 256,
    logits=functools.partial(paddle.matmul, transpose_y=True),
    cross_entropy=lambda logits_RV, targets_R, with_gradient, _, softcap: cross_entropy_(
        logits_RV, targets_R, with_gradient, softcap
    ),
    hidden_gradient=_hidden_gradient,
    weight_gradient=_weight_gradient,
)
CPP = Products(
    prepare=cpu.prepare,
    chunk=cpu.chunk,
    logits=cpu.logits,
    cross_entropy=cpu.cross_entropy,
    hidden_gradient=cpu.hidden_gradient,
    weight_gradient=cpu.weight_gradient,
)
