"""Cross entropy of rows of logits; the gradient overwrites the logits.

Shapes: R rows, V vocabulary size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import paddle

from paddlenlp_ext.ops.cpu.library import empty, function, pointer, usable
from paddlenlp_ext.ops.dispatch import DispatchedOp


def with_soft_cap(
    logits_RV: paddle.Tensor, softcap: float | None, compute: Callable[[], tuple[paddle.Tensor, int]]
) -> tuple[paddle.Tensor, int]:
    """Cap the logits in place, run `compute`, which replaces them by a gradient, and make it that of the logits before.

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
    """Compute loss and gradient in plain Paddle, in fp32 and mostly in place."""
    return with_soft_cap(logits_RV, softcap, lambda: _cross_entropy(logits_RV, targets_R, with_gradient))


def _cross_entropy(
    logits_RV: paddle.Tensor, targets_R: paddle.Tensor, with_gradient: bool
) -> tuple[paddle.Tensor, int]:
    best_R1 = logits_RV.argmax(axis=1, keepdim=True)
    num_correct = int((best_R1.squeeze(1) == targets_R).sum())
    largest_R1 = paddle.take_along_axis(logits_RV, best_R1, axis=1)
    picked_R = paddle.take_along_axis(logits_RV, targets_R.unsqueeze(1), axis=1).squeeze(1)
    # On the CPU paddle.logsumexp is many times slower than these passes over one buffer.
    exponentials_RV = logits_RV.subtract_(largest_R1).exp_()
    sums_R1 = _row_sums(exponentials_RV)
    if with_gradient:
        minus_one_R1 = paddle.full([targets_R.shape[0], 1], -1.0, logits_RV.dtype)
        probabilities_RV = exponentials_RV.multiply_(sums_R1.reciprocal())
        probabilities_RV.put_along_axis_(targets_R.unsqueeze(1), minus_one_R1, axis=1, reduce="add")
    return (sums_R1.log() + largest_R1).squeeze(1) - picked_R, num_correct


def cross_entropy_cpp(
    logits_RV: paddle.Tensor,
    targets_R: paddle.Tensor,
    with_gradient: bool,
    softcap: float | None = None,
    bf16_gradient: bool = False,
) -> tuple[paddle.Tensor, int]:
    """Compute loss and gradient in C++ (csrc/cross_entropy.cpp): one read of each row, sums in double precision.

    With `bf16_gradient` the gradient is bfloat16 and occupies the first half of each row's memory.
    """
    (num_rows, num_columns), targets_R = logits_RV.shape, targets_R.astype("int64")
    lowest, highest = int(targets_R.min()), int(targets_R.max())
    if lowest < 0 or highest >= num_columns:
        raise ValueError(f"labels range from {lowest} to {highest}, but the vocabulary has {num_columns} tokens")
    losses_R, num_correct = empty([num_rows]), ctypes.c_int64()
    sizes = num_rows, num_columns, softcap or 0.0, with_gradient, bf16_gradient
    function("cross_entropy")(
        pointer(logits_RV), pointer(targets_R), *sizes, pointer(losses_R), ctypes.byref(num_correct)
    )
    return losses_R, num_correct.value


def _row_sums(values_RV: paddle.Tensor) -> paddle.Tensor:
    """Return the row sums [R, 1]; on the CPU long rows are summed in two steps.

    Paddle's own sum accumulates sequentially there. Relative error over 49152 columns:

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


cross_entropy_op = DispatchedOp("cross_entropy", native=(cross_entropy_cpp, usable), reference=cross_entropy_reference)


def cross_entropy_(
    logits_RV: paddle.Tensor, targets_R: paddle.Tensor, with_gradient: bool, softcap: float | None = None
) -> tuple[paddle.Tensor, int]:
    """Return `logsumexp(logits) - logits[target]` of each row, and how many argmaxes equal the target.

    Args:
        logits_RV: fp32; overwritten with their gradient (softmax minus one at the target) if requested.
        targets_R: int64, from 0 to V - 1.
        with_gradient: whether to compute the gradient; if not, `logits_RV` is left with unspecified values.
        softcap: the loss is that of `softcap * tanh(logits / softcap)`; None: of the logits themselves.

    Returns:
        The losses, fp32 [R], and the number of correct predictions.

    Raises:
        ValueError: a target is outside the vocabulary (C++ backend; Paddle's ops raise their own errors).
    """
    return cross_entropy_op.choose(logits_RV)(logits_RV, targets_R, with_gradient, softcap)
