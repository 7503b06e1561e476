"""Embedding lookup, `table[ids]`."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F

from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.dispatch import DispatchedOp, NotApplicable, is_on_cpu
from paddlenlp_ext.ops.tensor_utils import contiguous, in_dtype


def embedding_reference(table: paddle.Tensor, ids: paddle.Tensor) -> paddle.Tensor:
    """Look up rows with Paddle; cast a bfloat16 table on the CPU to float32, because Paddle lacks a bfloat16 kernel."""
    if table.dtype == paddle.bfloat16 and is_on_cpu(table):
        table = table.astype("float32")
    return F.embedding(ids, table)


def embedding_cpp(table: paddle.Tensor, ids: paddle.Tensor) -> paddle.Tensor:
    """Look up rows of a bfloat16 table in C++ and cast the rows to float32; use the reference for trainable tables."""
    if paddle.is_grad_enabled() and not table.stop_gradient:
        return embedding_reference(table, ids)
    ids = contiguous(in_dtype(ids, paddle.int64))
    rows = library.empty([*ids.shape, table.shape[1]])
    count, (num_rows, width) = ids.size, table.shape
    addresses = library.pointer(table), library.pointer(ids), library.pointer(rows)
    library.function("embedding_rows")(*addresses, count, num_rows, width)
    return rows


def _stored_in_bf16(table: paddle.Tensor) -> str | None:
    if not table.place.is_cpu_place() or table.dtype != paddle.bfloat16:
        return NotApplicable(
            f"the backend needs a bfloat16 table on the CPU, but the table is {table.dtype.name} on {table.place}"
        )
    return library.unavailable_reason()


embedding_op = DispatchedOp("embedding", cpp=(embedding_cpp, _stored_in_bf16), reference=embedding_reference)


def embedding(table: paddle.Tensor, ids: paddle.Tensor) -> paddle.Tensor:
    """Return the rows `ids` [...] of a table [V, D], as [..., D].

    The result has the dtype of the table, except that bfloat16 tables on the CPU give float32.
    """
    return embedding_op.choose(table)(table, ids)
