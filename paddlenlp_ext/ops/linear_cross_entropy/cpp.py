"""Matmuls of the lm_head and cross entropy in C++, in float32 or with inputs rounded to bfloat16 (ops/cpp/bf16.py).

Shapes: R rows of a chunk, D hidden size, V vocabulary size.
"""

from __future__ import annotations

import ctypes

import paddle

from paddlenlp_ext.ops.cpp.bf16 import as_bf16, matmul_operand, uses_bf16
from paddlenlp_ext.ops.cpp.library import empty, function, pointer
from paddlenlp_ext.ops.linear import linear


def cross_entropy_cpp(
    logits_RV: paddle.Tensor,
    targets_R: paddle.Tensor,
    with_gradient: bool,
    softcap: float | None = None,
    bf16_gradient: bool = False,
) -> tuple[paddle.Tensor, int]:
    """Return losses [R] and the number of correct predictions, computed in C++ (csrc/cross_entropy.cpp).

    `with_gradient` overwrites the logits with their gradient. With `bf16_gradient`, the gradient is bfloat16 and fills
    the first half of the memory of each row of the logits.
    """
    (num_rows, num_columns), targets_R = logits_RV.shape, targets_R.astype("int64")
    lowest, highest = int(targets_R.min()), int(targets_R.max())
    if lowest < 0 or highest >= num_columns:
        raise ValueError(f"labels range from {lowest} to {highest}, but must be from 0 to {num_columns - 1}")
    losses_R, num_correct = empty([num_rows]), ctypes.c_int64()
    sizes = num_rows, num_columns, softcap or 0.0, with_gradient, bf16_gradient
    function("cross_entropy")(
        pointer(logits_RV), pointer(targets_R), *sizes, pointer(losses_R), ctypes.byref(num_correct)
    )
    return losses_R, num_correct.value


def prepare(weight_VD: paddle.Tensor, dtype: paddle.dtype) -> paddle.Tensor:
    """Return the lm_head weight in the dtype of the matmuls, converted once for all chunks."""
    weight_VD = matmul_operand(weight_VD)
    return as_bf16(weight_VD) if uses_bf16(weight_VD) else weight_VD


def chunk(weight_VD: paddle.Tensor) -> int:
    """Return the number of rows per chunk; larger chunks have faster matmuls but need more memory for logits."""
    return 384 if weight_VD.dtype == paddle.bfloat16 else 256


def logits(rows_RD: paddle.Tensor, weight_VD: paddle.Tensor) -> paddle.Tensor:
    """Return the logits, `rows @ weight^T` [R, V]."""
    return linear(rows_RD, weight_VD)


def cross_entropy(
    logits_RV: paddle.Tensor,
    targets_R: paddle.Tensor,
    with_gradient: bool,
    weight_VD: paddle.Tensor,
    softcap: float | None,
) -> tuple[paddle.Tensor, int]:
    """Return losses [R] and the number of correct predictions; overwrite the logits with their gradient.

    The gradient has the dtype of the matmuls. With a bfloat16 weight the gradient fills the first half of each row's
    memory, as `hidden_gradient` and `weight_gradient` expect.
    """
    return cross_entropy_cpp(logits_RV, targets_R, with_gradient, softcap, weight_VD.dtype == paddle.bfloat16)


def write_gradient(gradient_RV: paddle.Tensor, logits_RV: paddle.Tensor, weight_VD: paddle.Tensor) -> None:
    """Overwrite the logits with a float32 gradient, in the format that `cross_entropy` writes."""
    if weight_VD.dtype != paddle.bfloat16:
        if gradient_RV is not logits_RV:
            paddle.assign(gradient_RV, logits_RV)
        return
    num_rows, vocab_size = logits_RV.shape
    rounded_RV = as_bf16(gradient_RV)
    start, row_bytes = pointer(rounded_RV), 2 * vocab_size
    for row in range(num_rows):
        ctypes.memmove(pointer(logits_RV) + 2 * row * row_bytes, start + row * row_bytes, row_bytes)


def hidden_gradient(gradient_RV: paddle.Tensor, weight_VD: paddle.Tensor) -> paddle.Tensor:
    """Return the gradient of the hidden states, `gradient @ weight` [R, D]."""
    (num_rows, vocab_size), size = gradient_RV.shape, weight_VD.shape[1]
    out_RD, in_bf16 = empty([num_rows, size]), weight_VD.dtype == paddle.bfloat16
    run = function("head_hidden_gradient")
    run(pointer(gradient_RV), pointer(weight_VD), pointer(out_RD), num_rows, size, vocab_size, in_bf16)
    return out_RD


def weight_gradient(
    gradient_RV: paddle.Tensor, rows_RD: paddle.Tensor, weight_VD: paddle.Tensor, total_VD: paddle.Tensor | None
) -> paddle.Tensor:
    """Return the weight gradient, `gradient^T @ rows` [V, D], added to `total_VD` in place if given."""
    in_bf16, rows_RD = weight_VD.dtype == paddle.bfloat16, rows_RD.contiguous()
    read_RD = as_bf16(rows_RD) if in_bf16 else rows_RD
    out_VD = empty(weight_VD.shape) if total_VD is None else total_VD
    (num_rows, vocab_size), size = gradient_RV.shape, weight_VD.shape[1]
    run = function("head_weight_gradient")
    inputs = pointer(gradient_RV), pointer(read_RD)
    run(*inputs, pointer(out_VD), num_rows, size, vocab_size, total_VD is not None, in_bf16)
    return out_VD
