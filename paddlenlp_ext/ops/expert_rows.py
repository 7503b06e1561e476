"""Sort the hidden states of tokens by expert (MoE dispatch), and sum expert outputs per token (MoE combine).

    choices [T, K]      token 0: experts 2, 0      token 1: experts 0, 1      token 2: experts 2, 1
    sorted rows         expert 0: tokens 0, 1      expert 1: tokens 1, 2      expert 2: tokens 0, 2

Each pair of a token and a chosen expert is one row. Experts have no capacity limit, so no token is dropped. The
backward pass of dispatch is a combine, and the backward pass of combine is a dispatch.

Shapes: T tokens, K experts chosen per token, N rows, E experts, D features.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.recompute_functions import recompute_function, with_recompute_function
from paddlenlp_ext.ops.tensor_utils import contiguous


@dataclass(frozen=True)
class ExpertRows:
    """Permutation that sorts the rows of a batch by expert.

    Attributes:
        starts: int64 [E + 1], index of the first row of each expert, followed by N.
        choices: int64 [N], index of the row's pair (token, expert) in the flattened choices [T * K].
        positions: int64 [T, K], row index of each choice; -1 if another process holds the expert.
    """

    starts: np.ndarray
    choices: np.ndarray
    positions: np.ndarray

    @classmethod
    def sort(cls, experts_TK: np.ndarray, num_experts: int, first: int = 0) -> ExpertRows:
        """Sort the choices `experts_TK` by expert; choices of the same expert keep their order.

        Only choices of the local experts `first` to `first + num_experts - 1` become rows.
        """
        local_N = experts_TK.reshape(-1).astype(np.int64) - first
        outside_N = (local_N < 0) | (local_N >= num_experts)
        counts = np.bincount(local_N[~outside_N], minlength=num_experts)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        choices_N = np.argsort(np.where(outside_N, num_experts, local_N), kind="stable")[: starts[-1]]
        positions = np.full(local_N.shape, -1, np.int64)
        positions[choices_N] = np.arange(starts[-1])
        return cls(starts, choices_N.astype(np.int64), positions.reshape(experts_TK.shape))

    @cached_property
    def tokens(self) -> np.ndarray:
        """Token index of each row, int64 [N]."""
        return np.ascontiguousarray(self.choices // self.positions.shape[1])


def gather_reference(x_TD: paddle.Tensor, rows: ExpertRows) -> paddle.Tensor:
    """Dispatch tokens [T, D] to rows [N, D] with Paddle's gather."""
    return paddle.gather(x_TD, paddle.to_tensor(rows.tokens, place=x_TD.place))


def gather_cpp(x_TD: paddle.Tensor, rows: ExpertRows) -> paddle.Tensor:
    """Dispatch tokens [T, D] to rows [N, D] in C++ (csrc/token_rows.cpp)."""
    x_TD, width = contiguous(x_TD), x_TD.shape[1]
    result = library.empty([len(rows.tokens), width])
    addresses = library.pointer(x_TD), rows.tokens.ctypes.data, library.pointer(result)
    library.function("gather_rows")(*addresses, len(rows.tokens), width)
    return result


def sum_reference(rows_ND: paddle.Tensor, rows: ExpertRows) -> paddle.Tensor:
    """Sum the rows of each token, [T, D], with Paddle's index_add."""
    zeros = paddle.zeros([rows.positions.shape[0], rows_ND.shape[1]], rows_ND.dtype)
    return paddle.index_add(zeros, paddle.to_tensor(rows.tokens, place=rows_ND.place), 0, rows_ND)


def sum_cpp(rows_ND: paddle.Tensor, rows: ExpertRows) -> paddle.Tensor:
    """Sum the rows of each token, [T, D], in C++ (csrc/token_rows.cpp)."""
    rows_ND, positions_TK = contiguous(rows_ND), np.ascontiguousarray(rows.positions)
    result = library.empty([positions_TK.shape[0], rows_ND.shape[1]])
    addresses = library.pointer(rows_ND), positions_TK.ctypes.data, library.pointer(result)
    library.function("sum_rows")(*addresses, *positions_TK.shape, rows_ND.shape[1])
    return result


gather_op = DispatchedOp("gather_rows", cpp=(gather_cpp, library.usable), reference=gather_reference)
sum_op = DispatchedOp("sum_rows", cpp=(sum_cpp, library.usable), reference=sum_reference)


def gather_rows(x_TD: paddle.Tensor, rows: ExpertRows) -> paddle.Tensor:
    """Return the token rows sorted by expert, [N, D], with a recompute function (ops/recompute_functions.py)."""
    tokens_TD = x_TD.detach()
    result_ND = _DispatchOrCombine.apply(x_TD, rows, gather_op, sum_op)
    return with_recompute_function(result_ND, lambda: gather_op.choose(tokens_TD)(tokens_TD, rows))


def sum_rows(rows_ND: paddle.Tensor, rows: ExpertRows) -> paddle.Tensor:
    """Return the sum of each token's rows, [T, D]."""
    return _DispatchOrCombine.apply(rows_ND, rows, sum_op, gather_op)


class _DispatchOrCombine(PyLayer):
    @staticmethod
    def forward(ctx, x, rows, op, backward_op):
        ctx.rows, ctx.backward_op = rows, backward_op
        return op.choose(x)(x, rows)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.backward_op.choose(gradient)(gradient, ctx.rows)


def scale_rows(x_NF: paddle.Tensor, scale_N: paddle.Tensor) -> paddle.Tensor:
    """Multiply each row of x by its scale; if x has a recompute function, the backward pass recomputes x."""
    recompute_x = recompute_function(x_NF)
    if recompute_x is None:
        saved_NF = x_NF.detach()
        return _ScaleRows.apply(x_NF, scale_N, lambda: saved_NF)
    factors_N1 = scale_N.detach().unsqueeze(-1)
    return with_recompute_function(
        _ScaleRows.apply(x_NF, scale_N, recompute_x), lambda: recompute_x().multiply_(factors_N1)
    )


class _ScaleRows(PyLayer):
    @staticmethod
    def forward(ctx, x, scale, make_x):
        ctx.make_x, ctx.needs_grad = make_x, [not each.stop_gradient for each in (x, scale)]
        ctx.save_for_backward(scale)
        return x * scale.unsqueeze(-1)

    @staticmethod
    def backward(ctx, gradient):
        (scale,) = ctx.saved_tensor()
        x_gradient = gradient * scale.unsqueeze(-1) if ctx.needs_grad[0] else None
        return x_gradient, (gradient * ctx.make_x()).sum(-1) if ctx.needs_grad[1] else None


def add_bias(
    x_NO: paddle.Tensor, bias_EO: paddle.Tensor, rows: ExpertRows, scale_N: paddle.Tensor | None = None
) -> paddle.Tensor:
    """Add the expert's bias to each row; multiply the bias by the row's scale if `scale_N` is given."""
    return _AddBias.apply(x_NO, bias_EO, scale_N, rows)


class _AddBias(PyLayer):
    @staticmethod
    def forward(ctx, x, bias, scale, rows):
        ctx.rows, ctx.has_scale = rows, scale is not None
        ctx.needs_grad = [each is not None and not each.stop_gradient for each in (x, bias, scale)]
        ctx.save_for_backward(bias, *([] if scale is None else [scale]))
        added = _rows_of_bias(bias, rows)
        return x + (added if scale is None else added * scale.unsqueeze(-1)).astype(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        bias, *scale = ctx.saved_tensor()
        gradients = [gradient if ctx.needs_grad[0] else None, None, None]
        if ctx.needs_grad[1]:
            weighted, starts = gradient * scale[0].unsqueeze(-1) if scale else gradient, ctx.rows.starts
            sums = [weighted[a:b].sum(0) for a, b in itertools.pairwise(starts.tolist())]
            gradients[1] = paddle.stack(sums).astype(bias.dtype)
        if ctx.needs_grad[2]:
            gradients[2] = (gradient * _rows_of_bias(bias, ctx.rows)).sum(-1).astype(scale[0].dtype)
        return tuple(gradients[: 3 if ctx.has_scale else 2])


def _rows_of_bias(bias_EO: paddle.Tensor, rows: ExpertRows) -> paddle.Tensor:
    experts_N = np.repeat(np.arange(len(rows.starts) - 1), np.diff(rows.starts))
    return paddle.gather(bias_EO, paddle.to_tensor(experts_N, place=bias_EO.place))
