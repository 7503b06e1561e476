"""Cross entropy in plain Paddle, from hidden states and from rows of logits.

Shapes: T positions, R rows of logits, D hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable

import paddle

from paddlenlp_ext.utils.labels import IGNORED_LABEL


def linear_cross_entropy_reference(
    hidden_TD: paddle.Tensor, weight_VD: paddle.Tensor, labels_T: paddle.Tensor
) -> tuple[paddle.Tensor, int]:
    """Return the summed loss and the number of correct predictions over all labels other than -100."""
    is_target_T = labels_T != IGNORED_LABEL
    logits_TV = paddle.matmul(hidden_TD, weight_VD, transpose_y=True).astype("float32")
    labels_T = paddle.where(is_target_T, labels_T, paddle.zeros_like(labels_T))
    picked_T = paddle.take_along_axis(logits_TV, labels_T.unsqueeze(1), axis=1).squeeze(1)
    losses_T = (paddle.logsumexp(logits_TV, axis=1) - picked_T) * is_target_T.astype("float32")
    return losses_T.sum(), int(((logits_TV.argmax(axis=1) == labels_T) & is_target_T).sum())


def with_soft_cap(
    logits_RV: paddle.Tensor, softcap: float | None, compute: Callable[[], tuple[paddle.Tensor, int]]
) -> tuple[paddle.Tensor, int]:
    """Soft-cap the logits in place, run `compute`, then multiply the gradient in `logits_RV` by the cap's derivative.

    d softcap tanh(x / softcap) / dx = 1 - tanh(x / softcap)^2
    """
    if softcap is None:
        return compute()
    ratio_RV = logits_RV.scale_(1 / softcap).tanh_().clone()
    logits_RV.scale_(softcap)
    result = compute()
    logits_RV.multiply_(ratio_RV.square_().scale_(-1.0, bias=1.0))
    return result


def cross_entropy_reference(
    logits_RV: paddle.Tensor, targets_R: paddle.Tensor, with_gradient: bool, softcap: float | None = None
) -> tuple[paddle.Tensor, int]:
    """Compute losses and gradient in plain Paddle, in fp32 and mostly in place."""
    return with_soft_cap(logits_RV, softcap, lambda: _cross_entropy(logits_RV, targets_R, with_gradient))


def _cross_entropy(
    logits_RV: paddle.Tensor, targets_R: paddle.Tensor, with_gradient: bool
) -> tuple[paddle.Tensor, int]:
    best_R1 = logits_RV.argmax(axis=1, keepdim=True)
    num_correct = int((best_R1.squeeze(1) == targets_R).sum())
    largest_R1 = paddle.take_along_axis(logits_RV, best_R1, axis=1)
    picked_R = paddle.take_along_axis(logits_RV, targets_R.unsqueeze(1), axis=1).squeeze(1)
    # On the CPU, paddle.logsumexp takes many times as long as the in-place ops below.
    exponentials_RV = logits_RV.subtract_(largest_R1).exp_()
    sums_R1 = row_sums(exponentials_RV)
    if with_gradient:
        minus_one_R1 = paddle.full([targets_R.shape[0], 1], -1.0, logits_RV.dtype)
        probabilities_RV = exponentials_RV.multiply_(sums_R1.reciprocal())
        probabilities_RV.put_along_axis_(targets_R.unsqueeze(1), minus_one_R1, axis=1, reduce="add")
    return (sums_R1.log() + largest_R1).squeeze(1) - picked_R, num_correct


def row_sums(values_RV: paddle.Tensor) -> paddle.Tensor:
    """Return the row sums [R, 1]; on the CPU, rows are summed in two steps.

    Paddle's sum accumulates sequentially on the CPU. Relative error over 49152 columns:

        paddle.sum                  2e-4
        matmul with ones, blocks    1e-7 (and faster)
    """
    if not values_RV.place.is_cpu_place():
        return values_RV.sum(axis=1, keepdim=True)
    num_columns = values_RV.shape[1]
    width = max(width for width in range(1, 513) if num_columns % width == 0)
    blocks = paddle.matmul(values_RV.reshape([-1, width]), paddle.ones([width, 1], values_RV.dtype))
    num_blocks = num_columns // width
    return paddle.matmul(blocks.reshape([-1, num_blocks]), paddle.ones([num_blocks, 1], values_RV.dtype))
