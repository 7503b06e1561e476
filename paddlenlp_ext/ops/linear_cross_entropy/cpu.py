"""Matmuls of an lm_head in C++, in float32 or with inputs rounded to bfloat16 (`ops/cpu/bf16.py`).

Shapes: R rows of a chunk, D hidden size, V vocabulary size.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.cpu.bf16 import as_bf16, uses_bf16
from paddlenlp_ext.ops.cpu.library import empty, function, pointer
from paddlenlp_ext.ops.linear import forward, matmul_operand
from paddlenlp_ext.ops.linear_cross_entropy.cross_entropy import cross_entropy_cpp


def prepare(weight_VD: paddle.Tensor, dtype: paddle.dtype) -> paddle.Tensor:
    """Return the lm_head's weight in the dtype of the matmuls, once for all chunks."""
    weight_VD = matmul_operand(weight_VD)
    return as_bf16(weight_VD) if uses_bf16(weight_VD) else weight_VD


def chunk(weight_VD: paddle.Tensor) -> int:
    """Return the rows per chunk: larger chunks have faster matmuls but need more memory for their logits."""
    return 384 if weight_VD.dtype == paddle.bfloat16 else 256


def logits(rows_RD: paddle.Tensor, weight_VD: paddle.Tensor) -> paddle.Tensor:
    """Return `rows @ weight^T`, [R, V]."""
    return forward(rows_RD.contiguous(), weight_VD, None)


def cross_entropy(
    logits_RV: paddle.Tensor,
    targets_R: paddle.Tensor,
    with_gradient: bool,
    weight_VD: paddle.Tensor,
    softcap: float | None,
) -> tuple[paddle.Tensor, int]:
    """Return losses [R] and correct predictions; the gradient, in the dtype of the matmuls, overwrites the logits.

    With a bfloat16 weight the gradient fills the first half of each row's memory; only the functions below can read it.
    """
    return cross_entropy_cpp(logits_RV, targets_R, with_gradient, softcap, weight_VD.dtype == paddle.bfloat16)


def hidden_gradient(gradient_RV: paddle.Tensor, weight_VD: paddle.Tensor) -> paddle.Tensor:
    """Return `gradient @ weight`, [R, D]."""
    (num_rows, vocab_size), size = gradient_RV.shape, weight_VD.shape[1]
    out_RD, in_bf16 = empty([num_rows, size]), weight_VD.dtype == paddle.bfloat16
    run = function("head_hidden_gradient")
    run(pointer(gradient_RV), pointer(weight_VD), pointer(out_RD), num_rows, size, vocab_size, in_bf16)
    return out_RD


def weight_gradient(
    gradient_RV: paddle.Tensor, rows_RD: paddle.Tensor, weight_VD: paddle.Tensor, total_VD: paddle.Tensor | None
) -> paddle.Tensor:
    """Return `gradient^T @ rows`, [V, D], added to `total_VD` in place if given."""
    in_bf16, rows_RD = weight_VD.dtype == paddle.bfloat16, rows_RD.contiguous()
    read_RD = as_bf16(rows_RD) if in_bf16 else rows_RD
    out_VD = empty(weight_VD.shape) if total_VD is None else total_VD
    (num_rows, vocab_size), size = gradient_RV.shape, weight_VD.shape[1]
    run = function("head_weight_gradient")
    inputs = pointer(gradient_RV), pointer(read_RD)
    run(*inputs, pointer(out_VD), num_rows, size, vocab_size, total_VD is not None, in_bf16)
    return out_VD
