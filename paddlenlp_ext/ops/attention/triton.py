"""Attention of Paddle tensors with Triton kernels, which support all score options.

The mask of the kernels stores one range of queries per key. One range per key cannot represent prefixes and some
parent documents, so their keys and values are copied into each document that attends to them (start_rows.py). The
forward pass saves its inputs, its output and the log-sum-exp of the scores.

Tested in Triton's interpreter on the CPU (tests/ops/attention/test_triton.py), except for the launch itself. Not yet
run on a GPU with Paddle.

Shapes: B batch, S sequence, N query heads, K key-value heads, H head dimension of queries and keys, E head dimension of
values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.attention.document_layout import AttentionLayout, KeyValuePrefix
from paddlenlp_ext.ops.attention.kernels.tile_lists import tile_lists
from paddlenlp_ext.ops.attention.score_options import PLAIN, ScoreOptions
from paddlenlp_ext.ops.attention.start_rows import attend_in_copies, start_rows, start_rows_on
from paddlenlp_ext.ops.tensor_utils import needs_grad
from paddlenlp_ext.ops.triton_utils.launch import empty_beside, launch

if TYPE_CHECKING:
    from paddlenlp_ext.ops.attention.kernels.inputs import Problem, Walk
    from paddlenlp_ext.ops.triton_utils.tile_sizes import TileSizes


def attention_triton(
    q_BSNH: paddle.Tensor,
    k_BSKH: paddle.Tensor,
    v_BSKE: paddle.Tensor,
    layout: AttentionLayout,
    scale: float,
    prefix: KeyValuePrefix | None = None,
    options: ScoreOptions = PLAIN,
) -> paddle.Tensor:
    """Compute `attention` with the Triton kernels."""
    attend = functools.partial(_attend, scale, options)
    return attend_in_copies(attend, (q_BSNH, k_BSKH, v_BSKE), layout, prefix, options.slopes is not None)


def _attend(
    scale: float,
    options: ScoreOptions,
    q_BSNH: paddle.Tensor,
    k_BSKH: paddle.Tensor,
    v_BSKE: paddle.Tensor,
    layout: AttentionLayout,
) -> paddle.Tensor:
    same = (x if x.dtype == q_BSNH.dtype else x.astype(q_BSNH.dtype) for x in (q_BSNH, k_BSKH, v_BSKE))
    inputs = *(x.contiguous() for x in same), *options.sink_tensors
    if needs_grad(*inputs):
        return _Attention.apply(layout, scale, options, *inputs)
    return _forward(_problem(layout, scale, options, inputs), layout)[0]


class _Attention(PyLayer):
    @staticmethod
    def forward(ctx, layout, scale, options, *inputs):
        out_BSNE, log_sums_BNS = _forward(_problem(layout, scale, options, inputs), layout)
        ctx.save_for_backward(*inputs, out_BSNE, log_sums_BNS)
        ctx.layout, ctx.scale, ctx.options = layout, scale, options
        ctx.grads_needed = [not x.stop_gradient for x in inputs]
        return out_BSNE

    @staticmethod
    def backward(ctx, out_gradient_BSNE):
        from paddlenlp_ext.ops.attention.kernels.backward import (
            KEY_SIZES,
            QUERY_SIZES,
            launch_key_gradients,
            launch_query_gradient,
        )

        *inputs, out_BSNE, log_sums_BNS = ctx.saved_tensor()
        problem, needed = _problem(ctx.layout, ctx.scale, ctx.options, inputs), ctx.grads_needed
        gradients, gradient_BSNE = [empty_beside(x) for x in inputs], out_gradient_BSNE.contiguous()
        sink_gradient = gradients[3] if needed[3:] == [True] else None
        deltas_BNS = _deltas(problem, out_BSNE, gradient_BSNE, log_sums_BNS, sink_gradient)
        saved = gradient_BSNE, log_sums_BNS, deltas_BNS
        if needed[0]:
            walk = _walk(ctx.layout, QUERY_SIZES, problem)
            launch_query_gradient(launch, problem, walk, saved, gradients[0])
        if needed[1] or needed[2]:
            walk = _walk(ctx.layout, KEY_SIZES, problem, of_keys=True)
            launch_key_gradients(launch, problem, walk, saved, (gradients[1], gradients[2]))
        # Paddle rejects gradients for frozen inputs.
        return tuple(own if is_needed else None for own, is_needed in zip(gradients, needed, strict=True))


def _forward(problem: Problem, layout: AttentionLayout) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the output [B, S, N, E], and the log-sum-exp of the scores in base 2, fp32 [B, N, S]."""
    from paddlenlp_ext.ops.attention.kernels.forward import SIZES, launch_forward

    batch, length, heads = problem.shape
    out_BSNE = empty_beside(problem.q, [batch, length, heads, problem.v.shape[3]])
    log_sums_BNS = empty_beside(problem.q, [batch, heads, length], paddle.float32)
    launch_forward(launch, problem, _walk(layout, SIZES, problem), out_BSNE, log_sums_BNS)
    return out_BSNE, log_sums_BNS


def _deltas(
    problem: Problem,
    out_BSNE: paddle.Tensor,
    gradient_BSNE: paddle.Tensor,
    log_sums_BNS: paddle.Tensor,
    sink_gradient_N: paddle.Tensor | None,
) -> paddle.Tensor:
    """Return sum(out * d out) per query and head, fp32 [B, N, S]; write the sinks' gradient to `sink_gradient_N`."""
    from paddlenlp_ext.ops.attention.kernels.backward import launch_deltas, num_sink_parts
    from paddlenlp_ext.ops.triton_utils.column_sums import launch_column_sums

    deltas_BNS, parts = empty_beside(log_sums_BNS), None
    if sink_gradient_N is not None:
        parts = empty_beside(log_sums_BNS, [num_sink_parts(problem), problem.q.shape[2]])
    launch_deltas(launch, problem, out_BSNE, gradient_BSNE, log_sums_BNS, deltas_BNS, parts)
    if sink_gradient_N is not None:
        launch_column_sums(launch, parts, sink_gradient_N)
    return deltas_BNS


def _problem(layout: AttentionLayout, scale: float, options: ScoreOptions, inputs: Sequence[paddle.Tensor]) -> Problem:
    """Return the inputs of the kernels; the slopes are copied to the device once per layout."""
    from paddlenlp_ext.ops.attention.kernels.inputs import Problem

    (q, k, v, *sinks), slopes_N = inputs, options.slopes
    batch, length, heads, head_dim = q.shape
    assert batch * length == layout.num_positions, f"{batch} x {length} queries, {layout.num_positions} positions"
    assert k.shape == [batch, length, k.shape[2], head_dim] and heads % k.shape[2] == 0, f"{q.shape}, keys {k.shape}"
    assert v.shape[:3] == k.shape[:3], f"keys {k.shape}, values {v.shape}"
    assert all(each.shape == [heads] for each in sinks), f"{heads} heads need one sink each"
    slopes = None
    if slopes_N is not None:
        assert slopes_N.shape == (heads,), f"{heads} heads need one slope each"
        key = ("slopes", slopes_N.tobytes())
        slopes = layout.cached(key, lambda: paddle.to_tensor(slopes_N.astype("float32"), place=q.place))
    rows = start_rows_on(q.place, layout)
    return Problem(q, k, v, rows, scale, options.softcap, slopes, sinks[0] if sinks else None)


def _walk(layout: AttentionLayout, table: TileSizes, problem: Problem, of_keys: bool = False) -> Walk:
    """Return the tile sizes and the tile lists of a kernel; the lists are built once per layout."""
    from paddlenlp_ext.ops.attention.kernels.inputs import Walk, sizes_for

    sizes = sizes_for(table, problem)
    tile = sizes["QUERIES"], sizes["KEYS"], of_keys

    def make() -> tuple[paddle.Tensor, ...]:
        lists = tile_lists(start_rows(layout)[:, 0, :, 0], *tile)
        return tuple(paddle.to_tensor(each, place=problem.q.place) for each in lists)

    return Walk(sizes, *layout.cached(("tiles", *tile), make))
