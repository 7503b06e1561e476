"""The matrix products of a linear head in the native library: in float32, or with inputs rounded to bfloat16 (half.py).

Shapes: R rows of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.half import as_half, halves
from paddlenlp_ext.ops.linear_native import forward, readable
from paddlenlp_ext.ops.native import empty, function, pointer


def prepare(weight_VD: paddle.Tensor, dtype: paddle.dtype) -> paddle.Tensor:
    """The head's weight in the format of the products, once for all chunks; one that trains counts as float32."""
    weight_VD = readable(weight_VD) if weight_VD.stop_gradient else weight_VD.astype("float32")
    return as_half(weight_VD) if halves(weight_VD) else weight_VD


def logits(rows_RD: paddle.Tensor, weight_VD: paddle.Tensor) -> paddle.Tensor:
    """`rows @ weight^T`, [R, V]."""
    return forward(rows_RD.contiguous(), weight_VD, None)


def hidden_gradient(gradient_RV: paddle.Tensor, weight_VD: paddle.Tensor) -> paddle.Tensor:
    """`gradient @ weight`, [R, D]."""
    out_RD = empty([gradient_RV.shape[0], weight_VD.shape[1]])
    return _product("linear_input_gradient", gradient_RV, weight_VD, out_RD)


def weight_gradient(
    gradient_RV: paddle.Tensor, rows_RD: paddle.Tensor, weight_VD: paddle.Tensor, total_VD: paddle.Tensor | None
) -> paddle.Tensor:
    """`gradient^T @ rows`, [V, D], added to `total_VD` in place where there is one."""
    rows_RD = rows_RD.contiguous()
    read_RD = as_half(rows_RD) if weight_VD.dtype == paddle.bfloat16 else rows_RD
    if total_VD is None:
        return _product("linear_weight_gradient", gradient_RV, read_RD, empty(weight_VD.shape))
    return _product("linear_add_weight_gradient", gradient_RV, read_RD, total_VD)


def _product(name: str, gradient_RV: paddle.Tensor, other: paddle.Tensor, out: paddle.Tensor) -> paddle.Tensor:
    half = other.dtype == paddle.bfloat16
    read_RV = as_half(gradient_RV) if half else gradient_RV
    sizes = gradient_RV.shape[0], other.shape[1], gradient_RV.shape[1]
    function(name, "pppiiii")(pointer(read_RV), pointer(other), pointer(out), *sizes, half)
    return out
