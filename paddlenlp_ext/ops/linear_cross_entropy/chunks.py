"""Cross entropy of target positions, computed in chunks with the matmuls of a backend.

The logits are h W^T, plus u B^T for each low-rank update (u, B) of lm_head.

Shapes: T positions; R target positions, of the batch or of one chunk; D hidden size, V vocabulary size, K rank of an
update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.linear_cross_entropy import cpp
from paddlenlp_ext.ops.linear_cross_entropy.cross_entropy import cross_entropy_
from paddlenlp_ext.ops.linear_cross_entropy.reference import with_soft_cap
from paddlenlp_ext.ops.tensor_utils import in_dtype
from paddlenlp_ext.utils.labels import IGNORED_LABEL


def _write_gradient(gradient_RV: paddle.Tensor, logits_RV: paddle.Tensor, _: paddle.Tensor) -> None:
    if gradient_RV is not logits_RV:
        paddle.assign(in_dtype(gradient_RV, logits_RV.dtype), logits_RV)


@dataclass(frozen=True)
class Products:
    """Functions of a backend: weight conversion, chunk size, logits, cross entropy, input and weight gradient.

    `cross_entropy` overwrites the logits with their gradient. The logits are float32 if `float32_logits` is True,
    otherwise in the dtype of the matmuls. `weight_gradient` accumulates over chunks. With a sharded weight,
    `complete_hidden` all-reduces the gradient of the hidden states in place. `write_gradient` overwrites logits with a
    float32 gradient, in the format that `hidden_gradient` and `weight_gradient` read; its last argument is the weight.
    """

    prepare: Callable[[paddle.Tensor, paddle.dtype], paddle.Tensor]
    chunk: Callable[[paddle.Tensor], int]
    logits: Callable[[paddle.Tensor, paddle.Tensor], paddle.Tensor]
    cross_entropy: Callable[
        [paddle.Tensor, paddle.Tensor, bool, paddle.Tensor, float | None], tuple[paddle.Tensor, int | paddle.Tensor]
    ]
    hidden_gradient: Callable[[paddle.Tensor, paddle.Tensor], paddle.Tensor]
    weight_gradient: Callable[[paddle.Tensor, paddle.Tensor, paddle.Tensor, paddle.Tensor | None], paddle.Tensor]
    complete_hidden: Callable[[paddle.Tensor], object] = lambda _: None
    write_gradient: Callable[[paddle.Tensor, paddle.Tensor, paddle.Tensor], None] = _write_gradient
    float32_logits: bool = True


Updates = Sequence[tuple[paddle.Tensor, paddle.Tensor]]
"""Low-rank updates of the logits: pairs of u, [T, K] or [R, K], and B [V, K], whose products u B^T are added."""

RowLosses = Callable[[paddle.Tensor, paddle.Tensor], tuple[paddle.Tensor, paddle.Tensor, int]]
"""Function that maps float32 logits [R, V] and targets [R] to losses [R], the gradient of the logits [R, V], and the
number of correct predictions; it may overwrite the logits."""

Losses = Callable[[paddle.Tensor, paddle.Tensor, paddle.Tensor, int | None, bool, Updates], tuple[paddle.Tensor, int]]
"""Function with the arguments of `losses_by_chunks` except `products`."""


def sum_of_losses(
    losses: Losses,
    hidden_TD: paddle.Tensor,
    weight_VD: paddle.Tensor,
    labels_T: paddle.Tensor,
    chunk: int | None,
    updates: Updates = (),
) -> tuple[paddle.Tensor, int]:
    """Return the summed loss of the target positions (an fp32 scalar) and the number of correct predictions."""
    positions_R = _target_positions(labels_T)
    if positions_R.shape[0] == 0:
        return _zero((hidden_TD, weight_VD), *updates), 0
    with paddle.amp.auto_cast(enable=False):  # sums are fp32; matmuls have the dtype of the hidden states
        rows = paddle.gather(hidden_TD, positions_R), weight_VD, paddle.gather(labels_T, positions_R)
        losses_R, num_correct = losses(*rows, chunk, True, _rows_of(updates, positions_R))
        # Double precision compensates for Paddle's sequential sum on the CPU.
        return losses_R.astype("float64").sum().astype("float32"), num_correct


def logprobs_of_losses(
    losses: Losses,
    hidden_TD: paddle.Tensor,
    weight_VD: paddle.Tensor,
    labels_T: paddle.Tensor,
    chunk: int | None,
    updates: Updates = (),
) -> paddle.Tensor:
    """Return the log-probability of each label, fp32 [T]; 0 at positions without a target."""
    positions_R, zeros_T = _target_positions(labels_T), paddle.zeros([labels_T.shape[0]], "float32")
    if positions_R.shape[0] == 0:
        return zeros_T + _zero((hidden_TD, weight_VD), *updates)
    with paddle.amp.auto_cast(enable=False):
        rows = paddle.gather(hidden_TD, positions_R), weight_VD, paddle.gather(labels_T, positions_R)
        losses_R, _ = losses(*rows, chunk, False, _rows_of(updates, positions_R))
        return paddle.scatter(zeros_T, positions_R, -losses_R)


def _target_positions(labels_T: paddle.Tensor) -> paddle.Tensor:
    return paddle.nonzero(labels_T != IGNORED_LABEL).flatten()


def _rows_of(updates: Updates, positions_R: paddle.Tensor) -> Updates:
    return [(paddle.gather(inner_TK, positions_R), b_VK) for inner_TK, b_VK in updates]


def _zero(*terms: tuple[paddle.Tensor, paddle.Tensor]) -> paddle.Tensor:
    """Return a zero that depends on the inputs, so that the inputs get zero gradients instead of None."""
    return paddle.add_n([each[:0].astype("float32").sum() for term in terms for each in term])


def losses_by_chunks(
    products: Products,
    hidden_RD: paddle.Tensor,
    weight_VD: paddle.Tensor,
    labels_R: paddle.Tensor,
    chunk: int | None,
    is_summed: bool,
    updates: Updates = (),
    softcap: float | None = None,
    row_losses: RowLosses | None = None,
) -> tuple[paddle.Tensor, int]:
    """Return the cross entropy of each position, fp32 [R], and the number of correct predictions.

    `is_summed` states that the caller sums the losses, so that all losses have the same gradient. `softcap` bounds the
    logits. `row_losses` computes a loss other than the cross entropy; `labels_R` are its targets.
    """
    if row_losses is not None:
        products = _with_row_losses(products, row_losses)
    counter = _Counter()
    options = chunk, paddle.is_grad_enabled(), counter, products, is_summed, softcap
    losses_R = _Losses.apply(hidden_RD, weight_VD, labels_R, *options, *(each for update in updates for each in update))
    return losses_R, int(counter.correct)


def _with_row_losses(products: Products, row_losses: RowLosses) -> Products:
    """Return the products with another loss in place of the cross entropy."""

    def compute_losses(
        logits_RV: paddle.Tensor,
        targets_R: paddle.Tensor,
        with_gradient: bool,
        weight_VD: paddle.Tensor,
        softcap: float | None,
    ) -> tuple[paddle.Tensor, int]:
        values_RV = in_dtype(logits_RV, paddle.float32)

        def replace_with_gradient() -> tuple[paddle.Tensor, int]:
            losses_R, gradient_RV, num_correct = row_losses(values_RV, targets_R)
            paddle.assign(gradient_RV, values_RV)
            return losses_R, num_correct

        result = with_soft_cap(values_RV, softcap, replace_with_gradient)
        if with_gradient:
            products.write_gradient(values_RV, logits_RV, weight_VD)
        return result

    return replace(products, cross_entropy=compute_losses)


class _Counter:
    """Mutable number of correct predictions, because a PyLayer can return only differentiable tensors."""

    correct: int | paddle.Tensor = 0


class _Losses(PyLayer):
    """Compute losses and gradients of each chunk in the forward pass, while the probabilities are in memory.

    The backward pass scales the gradients by the incoming gradient of the losses. The weight gradient is a sum over
    positions, and can be scaled only if all losses have the same incoming gradient. Otherwise, the backward pass
    recomputes the chunks.

    The logits are a sum of terms x W^T. A term is a pair (x, W): the hidden states and the lm_head, then the updates.
    """

    @staticmethod
    def forward(
        ctx, hidden_RD, weight_VD, labels_R, chunk, needs_grad, counter, products, is_summed, softcap, *updates
    ):
        terms = [(hidden_RD, weight_VD), *zip(updates[::2], updates[1::2], strict=True)]
        ctx.wants = [(needs_grad and not x.stop_gradient, needs_grad and not w.stop_gradient) for x, w in terms]
        ctx.products, ctx.softcap, ctx.weight_dtypes = products, softcap, [weight.dtype for _, weight in terms]
        rows, operands = [rows for rows, _ in terms], _operands(products, terms)
        ctx.chunk = products.chunk(operands[0]) if chunk is None else chunk
        ctx.is_recomputed = not is_summed and any(wants_weight for _, wants_weight in ctx.wants)
        if ctx.is_recomputed:
            ctx.save_for_backward(hidden_RD, weight_VD, labels_R, *updates)
        wants = [(False, False)] * len(terms) if ctx.is_recomputed else ctx.wants
        losses, total = [], _Gradients(products, wants, softcap)
        for *chunk_rows, targets_R in _chunks([*rows, labels_R], ctx.chunk):
            losses_R, num_correct = total.add(chunk_rows, targets_R, operands)
            losses.append(losses_R)
            counter.correct += num_correct
        ctx.gradients = total.result()
        return paddle.concat(losses)

    @staticmethod
    def backward(ctx, gradients_R):
        if ctx.is_recomputed:
            hidden_RD, weight_VD, labels_R, *updates = ctx.saved_tensor()
            terms = [(hidden_RD, weight_VD), *zip(updates[::2], updates[1::2], strict=True)]
            rows, operands = [rows for rows, _ in terms], _operands(ctx.products, terms)
            total = _Gradients(ctx.products, ctx.wants, ctx.softcap)
            for *chunk_rows, targets_R, factors_R in _chunks([*rows, labels_R, gradients_R], ctx.chunk):
                total.add(chunk_rows, targets_R, operands, factors_R)
            parts = total.result()
        else:
            # In-place scaling saves memory, but allows only one backward pass.
            parts, ctx.gradients = ctx.gradients, None
            assert parts is not None, "the backward pass of this loss has already run"
            for _, weight in parts:
                if weight is not None:  # all losses have the same gradient, because the caller sums them
                    weight.multiply_(gradients_R[0].astype(weight.dtype))
        gradients = []
        for (rows, weight), dtype in zip(parts, ctx.weight_dtypes, strict=True):
            if rows is not None:
                rows.multiply_(gradients_R.unsqueeze(1).astype(rows.dtype))
                ctx.products.complete_hidden(rows)
            # The gradient is scaled before rounding: a bfloat16 scale would change the gradient by up to 0.4 %.
            gradients += [rows, None if weight is None else in_dtype(weight, dtype)]
        return (*gradients[:2], None, *gradients[2:])  # labels have no gradient


def _operands(products: Products, terms: Sequence[tuple[paddle.Tensor, paddle.Tensor]]) -> list[paddle.Tensor]:
    """Return the weights of all terms as matmul operands, in the dtype of the first operand."""
    operands = [products.prepare(weight, rows.dtype) for rows, weight in terms]
    return [in_dtype(operand, operands[0].dtype) for operand in operands]


class _Gradients:
    """Gradients of x and W of each term, where needed, accumulated over chunks."""

    def __init__(self, products: Products, wants: Sequence[tuple[bool, bool]], softcap: float | None) -> None:
        self._products, self._wants, self._softcap = products, wants, softcap
        self._rows: list[list[paddle.Tensor]] = [[] for _ in wants]
        self._weights: list[paddle.Tensor | None] = [None for _ in wants]

    def add(
        self,
        rows: Sequence[paddle.Tensor],
        targets_R: paddle.Tensor,
        weights: Sequence[paddle.Tensor],
        factors_R: paddle.Tensor | None = None,
    ) -> tuple[paddle.Tensor, int | paddle.Tensor]:
        """Process a chunk; return losses [R] and the number of correct predictions.

        `factors_R` scale the rows only in the weight gradients, not in the gradients of `rows`.
        """
        products = self._products
        logits_RV = products.logits(rows[0], weights[0])
        dtype = paddle.float32 if products.float32_logits else logits_RV.dtype
        logits_RV = in_dtype(logits_RV, dtype)
        for inner_RK, b_VK in zip(rows[1:], weights[1:], strict=True):
            logits_RV.add_(in_dtype(products.logits(inner_RK, b_VK), dtype))
        with_gradient = any(any(wants) for wants in self._wants)
        cross_entropy = products.cross_entropy(logits_RV, targets_R, with_gradient, weights[0], self._softcap)
        for term, (wants_rows, wants_weight) in enumerate(self._wants):
            own, weight = rows[term], weights[term]
            if wants_rows:
                self._rows[term].append(products.hidden_gradient(logits_RV, weight))
            if wants_weight:
                scaled = own if factors_R is None else own * factors_R.unsqueeze(1).astype(own.dtype)
                self._weights[term] = products.weight_gradient(logits_RV, scaled, weight, self._weights[term])
        return cross_entropy

    def result(self) -> list[tuple[paddle.Tensor | None, paddle.Tensor | None]]:
        parts = zip(self._rows, self._weights, strict=True)
        return [(paddle.concat(rows) if rows else None, weight) for rows, weight in parts]


def _chunks(tensors: Sequence[paddle.Tensor], chunk: int) -> Iterator[list[paddle.Tensor]]:
    for start in range(0, tensors[0].shape[0], chunk):
        yield [each[start : start + chunk] for each in tensors]


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
    prepare=cpp.prepare,
    chunk=cpp.chunk,
    logits=cpp.logits,
    cross_entropy=cpp.cross_entropy,
    hidden_gradient=cpp.hidden_gradient,
    weight_gradient=cpp.weight_gradient,
    write_gradient=cpp.write_gradient,
)
