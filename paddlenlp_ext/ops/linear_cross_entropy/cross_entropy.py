"""Cross entropy of rows of logits, with its gradient in their place.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import ctypes

import paddle

from paddlenlp_ext.ops.cpu.library import function, pointer, usable
from paddlenlp_ext.ops.dispatch import DispatchedOp


def cross_entropy_reference(
    logits_RV: paddle.Tensor, targets_R: paddle.Tensor, with_gradient: bool
) -> tuple[paddle.Tensor, int]:
    """In plain Paddle, in fp32 and mostly in place."""
    best_R1 = logits_RV.argmax(axis=1, keepdim=True)
    num_correct = int((best_R1.squeeze(1) == targets_R).sum())
    largest_R1 = paddle.take_along_axis(logits_RV, best_R1, axis=1)
    picked_R = paddle.take_along_axis(logits_RV, targets_R.unsqueeze(1), axis=1).squeeze(1)
    # On the CPU paddle.logsumexp takes many times as long as these passes over one buffer.
    exponentials_RV = logits_RV.subtract_(largest_R1).exp_()
    sums_R1 = _row_sums(exponentials_RV)
    if with_gradient:
        minus_one_R1 = paddle.full([targets_R.shape[0], 1], -1.0, logits_RV.dtype)
        probabilities_RV = exponentials_RV.multiply_(sums_R1.reciprocal())
        probabilities_RV.put_along_axis_(targets_R.unsqueeze(1), minus_one_R1, axis=1, reduce="add")
    return (sums_R1.log() + largest_R1).sum() - picked_R.sum(), num_correct


def cross_entropy_cpp(
    logits_RV: paddle.Tensor, targets_R: paddle.Tensor, with_gradient: bool, bf16_gradient: bool = False
) -> tuple[paddle.Tensor, int]:
    """In C++ (csrc/cross_entropy.cpp): a row is read from memory once; sums in double precision.

    With `bf16_gradient` the gradient is bfloat16, in the first half of each row's memory.
    """
    (num_rows, num_columns), targets_R = logits_RV.shape, targets_R.astype("int64")
    lowest, highest = int(targets_R.min()), int(targets_R.max())
    if lowest < 0 or highest >= num_columns:
        raise ValueError(f"labels run from {lowest} to {highest}, and the vocabulary has {num_columns} tokens")
    loss, num_correct = ctypes.c_double(), ctypes.c_int64()
    sizes = num_rows, num_columns, with_gradient, bf16_gradient
    results = ctypes.byref(loss), ctypes.byref(num_correct)
    function("cross_entropy")(pointer(logits_RV), pointer(targets_R), *sizes, *results)
    return paddle.full([], loss.value), num_correct.value


def _row_sums(values_RV: paddle.Tensor) -> paddle.Tensor:
    """[R, 1]: sums over long rows, on the CPU taken in two steps.

    Paddle's own sum adds one number after the other there: over 49152 columns it is off by 2e-4 of the value. A
    matmul with ones adds in blocks and is faster; blocks of blocks bring the error to 1e-7.
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
    logits_RV: paddle.Tensor, targets_R: paddle.Tensor, with_gradient: bool
) -> tuple[paddle.Tensor, int]:
    """Sum over the rows of `logsumexp(logits) - logits[target]`, and in how many rows argmax is the target.

    Args:
        logits_RV: fp32; overwritten, with their own gradient (softmax, less one at the target) if that is wanted.
        targets_R: int64, from 0 to V - 1.
        wants_gradient: without it, what is left in `logits_RV` is unspecified.

    Returns:
        The loss, an fp32 scalar, and the number of hits.

    Raises:
        ValueError: a target outside the vocabulary (the native twin; Paddle's own ops raise theirs).
    """
    return cross_entropy_op.choose(logits_RV)(logits_RV, targets_R, with_gradient)
