"""Triton kernels of the attention backward pass: deltas, query gradients, and key and value gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from paddlenlp_ext.ops.attention.kernels.inputs import (
    Problem,
    Walk,
    channels_of,
    constants_of,
    factors,
    mask_tensors,
    sizes_for,
    tile_sizes,
)
from paddlenlp_ext.ops.attention.kernels.tiles import LOG2_E, load_rows, rows_of_head, scores_of, store_rows, tiles_of
from paddlenlp_ext.ops.triton_utils.tile_sizes import TileSizes

QUERY_SIZES, KEY_SIZES = tile_sizes("attention_queries"), tile_sizes("attention_keys")
DELTA_SIZES = TileSizes("attention_deltas", ("row_bytes",), QUERIES=(16, 32, 64, 128), num_warps=(4, 8))


@triton.jit
def attention_deltas_kernel(
    out,  # [B, S, N, E]
    gradient,  # do [B, S, N, E]
    log_sums,  # float32 [B, N, S], read only if SINKS
    sinks,  # float32 [N], read only if SINKS
    deltas,  # float32 [B, N, S], written
    sink_parts,  # float32 [B * tiles, N], written only if SINKS
    length,  # S
    num_heads,  # N
    SINKS: tl.constexpr,
    VALUE_DIM: tl.constexpr,  # E
    VALUE_CHANNELS: tl.constexpr,  # E, rounded up to a power of two
    QUERIES: tl.constexpr,
):
    """Compute the deltas of a tile of queries of one head, and a partial sum of the sink gradient."""
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, stride = tile * QUERIES, num_heads * VALUE_DIM
    m = first + tl.arange(0, QUERIES)
    own = row * length * stride + head * VALUE_DIM
    own_out = load_rows(out + own, first, length, stride, QUERIES, VALUE_DIM, VALUE_CHANNELS, True).to(tl.float32)
    own_gradient = load_rows(gradient + own, first, length, stride, QUERIES, VALUE_DIM, VALUE_CHANNELS, True)
    delta = tl.sum(own_out * own_gradient.to(tl.float32), axis=1)
    at = (row * num_heads + head) * length + m
    tl.store(deltas + at, delta, mask=m < length)
    if SINKS:
        log_sum = tl.load(log_sums + at, mask=m < length, other=float("inf"))  # p = 0 past the end of the row
        p = tl.exp2(tl.load(sinks + head) * LOG2_E - log_sum)
        tl.store(sink_parts + (row * tl.num_programs(0) + tile) * num_heads + head, -tl.sum(p * delta, axis=0))


@triton.jit
def _statistics(log_sums, deltas, m, length):
    """Return L and delta of the queries m; 0 for queries at or after `length`, which attend to no key."""
    is_query = m < length
    return tl.load(log_sums + m, mask=is_query, other=0.0), tl.load(deltas + m, mask=is_query, other=0.0)


@triton.jit
def _query_gradient_tile(
    sums, own_q, own_gradient, log_sum, delta, k, v, start_rows, first, m, length, k_stride, v_stride,
    inner, outer, slope,
    CAPPED: tl.constexpr, BIASED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CHANNELS: tl.constexpr, VALUE_CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Accumulate the contribution of a tile of keys to dq of queries m."""
    n = first + tl.arange(0, KEYS)
    own_k = load_rows(k, first, length, k_stride, KEYS, HEAD_DIM, CHANNELS, MASKED)
    own_v = load_rows(v, first, length, v_stride, KEYS, VALUE_DIM, VALUE_CHANNELS, MASKED)
    starts = n
    if MASKED:
        starts = tl.load(start_rows + n, mask=n < length, other=0)
    x = tl.dot(own_q, tl.trans(own_k), input_precision=PRECISION)
    x, ratio = scores_of(x, m[:, None], n[None, :], starts[None, :], inner, outer, slope, CAPPED, BIASED, MASKED)
    p = tl.exp2(x * (1.0 if BIASED else outer) - log_sum[:, None])
    dx = p * (tl.dot(own_gradient, tl.trans(own_v), input_precision=PRECISION) - delta[:, None])
    if CAPPED:
        dx *= 1.0 - ratio * ratio
    return tl.dot(dx.to(own_k.dtype), own_k, sums, input_precision=PRECISION)


@triton.jit
def attention_queries_kernel(
    q,  # [B, S, N, H]
    k,  # [B, S, K, H]
    v,  # [B, S, K, E]
    slopes,  # float32 [N], read only if BIASED
    start_rows,  # int32 [B, S]
    indices,  # int32 [B, tiles, width]
    counts,  # int32 [B, tiles, 2]
    gradient,  # do [B, S, N, E]
    log_sums,  # float32 [B, N, S]
    deltas,  # float32 [B, N, S]
    q_gradient,  # [B, S, N, H], written
    length,  # S
    num_heads,  # N
    group,  # N / K
    width,
    inner,
    outer,
    scale,
    CAPPED: tl.constexpr,
    BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # H and E
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,  # H and E, rounded up to powers of two
    VALUE_CHANNELS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute dq of a tile of queries of one head."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_heads, position = num_heads // group, row * length
    k, k_stride = rows_of_head(k, position, kv_heads, head // group, HEAD_DIM)
    v, v_stride = rows_of_head(v, position, kv_heads, head // group, VALUE_DIM)
    q, q_stride = rows_of_head(q, position, num_heads, head, HEAD_DIM)
    q_gradient, _ = rows_of_head(q_gradient, position, num_heads, head, HEAD_DIM)
    gradient, out_stride = rows_of_head(gradient, position, num_heads, head, VALUE_DIM)
    first = tile * QUERIES
    m = first + tl.arange(0, QUERIES)
    own_q = load_rows(q, first, length, q_stride, QUERIES, HEAD_DIM, CHANNELS, True)
    own_gradient = load_rows(gradient, first, length, out_stride, QUERIES, VALUE_DIM, VALUE_CHANNELS, True)
    at = (row * num_heads + head) * length
    log_sum, delta = _statistics(log_sums + at, deltas + at, m, length)
    slope = tl.load(slopes + head) * LOG2_E if BIASED else 0.0
    sums = tl.zeros((QUERIES, CHANNELS), dtype=tl.float32)
    indices, full, every = tiles_of(indices, counts, row, tile, width)
    start_rows += position
    for masked in tl.static_range(2):
        for index in range(full if masked else 0, every if masked else full):
            sums = _query_gradient_tile(
                sums, own_q, own_gradient, log_sum, delta, k, v, start_rows, tl.load(indices + index) * KEYS, m,
                length, k_stride, v_stride, inner, outer, slope, CAPPED, BIASED, masked, PRECISION, HEAD_DIM,
                VALUE_DIM, CHANNELS, VALUE_CHANNELS, KEYS,
            )  # fmt: skip
    store_rows(q_gradient, sums * scale, first, length, q_stride, QUERIES, HEAD_DIM, CHANNELS)


@triton.jit
def _key_gradient_tile(
    k_sums, v_sums, own_k, own_v, n, starts, q, gradient, log_sums, deltas, first, length, q_stride, out_stride,
    inner, outer, slope,
    CAPPED: tl.constexpr, BIASED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CHANNELS: tl.constexpr, VALUE_CHANNELS: tl.constexpr,
    QUERIES: tl.constexpr,
):  # fmt: skip
    """Accumulate the contribution of a tile of queries to dk and dv of keys n; scores are transposed, keys first."""
    m = first + tl.arange(0, QUERIES)
    own_q = load_rows(q, first, length, q_stride, QUERIES, HEAD_DIM, CHANNELS, MASKED)
    own_gradient = load_rows(gradient, first, length, out_stride, QUERIES, VALUE_DIM, VALUE_CHANNELS, MASKED)
    log_sum, delta = _statistics(log_sums, deltas, m, length)
    x = tl.dot(own_k, tl.trans(own_q), input_precision=PRECISION)
    x, ratio = scores_of(x, m[None, :], n[:, None], starts[:, None], inner, outer, slope, CAPPED, BIASED, MASKED)
    p = tl.exp2(x * (1.0 if BIASED else outer) - log_sum[None, :])
    v_sums = tl.dot(p.to(own_gradient.dtype), own_gradient, v_sums, input_precision=PRECISION)
    dx = p * (tl.dot(own_v, tl.trans(own_gradient), input_precision=PRECISION) - delta[None, :])
    if CAPPED:
        dx *= 1.0 - ratio * ratio
    return tl.dot(dx.to(own_q.dtype), own_q, k_sums, input_precision=PRECISION), v_sums


@triton.jit
def attention_keys_kernel(
    q,  # [B, S, N, H]
    k,  # [B, S, K, H]
    v,  # [B, S, K, E]
    slopes,  # float32 [N], read only if BIASED
    start_rows,  # int32 [B, S]
    indices,  # int32 [B, tiles, width]
    counts,  # int32 [B, tiles, 2]
    gradient,  # do [B, S, N, E]
    log_sums,  # float32 [B, N, S]
    deltas,  # float32 [B, N, S]
    k_gradient,  # [B, S, K, H], written
    v_gradient,  # [B, S, K, E], written
    length,  # S
    num_heads,  # N
    group,  # N / K
    width,
    inner,
    outer,
    scale,
    CAPPED: tl.constexpr,
    BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # H and E
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,  # H and E, rounded up to powers of two
    VALUE_CHANNELS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute dk and dv of a tile of keys of one key-value head, summed over the query heads of the group."""
    tile, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_heads, position = num_heads // group, row * length
    k, k_stride = rows_of_head(k, position, kv_heads, kv_head, HEAD_DIM)
    v, v_stride = rows_of_head(v, position, kv_heads, kv_head, VALUE_DIM)
    k_gradient, _ = rows_of_head(k_gradient, position, kv_heads, kv_head, HEAD_DIM)
    v_gradient, _ = rows_of_head(v_gradient, position, kv_heads, kv_head, VALUE_DIM)
    first = tile * KEYS
    n = first + tl.arange(0, KEYS)
    own_k = load_rows(k, first, length, k_stride, KEYS, HEAD_DIM, CHANNELS, True)
    own_v = load_rows(v, first, length, v_stride, KEYS, VALUE_DIM, VALUE_CHANNELS, True)
    starts = tl.load(start_rows + position + n, mask=n < length, other=0)
    k_sums = tl.zeros((KEYS, CHANNELS), dtype=tl.float32)
    v_sums = tl.zeros((KEYS, VALUE_CHANNELS), dtype=tl.float32)
    indices, full, every = tiles_of(indices, counts, row, tile, width)
    for head in range(kv_head * group, (kv_head + 1) * group):
        slope = tl.load(slopes + head) * LOG2_E if BIASED else 0.0
        head_q, q_stride = rows_of_head(q, position, num_heads, head, HEAD_DIM)
        head_gradient, out_stride = rows_of_head(gradient, position, num_heads, head, VALUE_DIM)
        of_head = (row * num_heads + head) * length
        for masked in tl.static_range(2):
            for index in range(full if masked else 0, every if masked else full):
                k_sums, v_sums = _key_gradient_tile(
                    k_sums, v_sums, own_k, own_v, n, starts, head_q, head_gradient, log_sums + of_head,
                    deltas + of_head, tl.load(indices + index) * QUERIES, length, q_stride, out_stride, inner, outer,
                    slope, CAPPED, BIASED, masked, PRECISION, HEAD_DIM, VALUE_DIM, CHANNELS, VALUE_CHANNELS, QUERIES,
                )  # fmt: skip
    store_rows(k_gradient, k_sums * scale, first, length, k_stride, KEYS, HEAD_DIM, CHANNELS)
    store_rows(v_gradient, v_sums, first, length, v_stride, KEYS, VALUE_DIM, VALUE_CHANNELS)


def num_sink_parts(problem: Problem) -> int:
    """Return the number of partial sums of the sink gradients."""
    batch, length, _ = problem.shape
    return batch * triton.cdiv(length, sizes_for(DELTA_SIZES, problem)["QUERIES"])


def launch_deltas(
    launch: Callable[..., None], problem: Problem, out: Any, gradient: Any, log_sums: Any, deltas: Any, sink_parts: Any
) -> None:
    """Launch the computation of delta, the first step of the backward pass.

    Args:
        launch: function that takes a kernel, its grid, its arguments and its constants.
        problem: inputs of the forward pass.
        out: output of the forward pass, [B, S, N, E], contiguous.
        log_sums: log-sum-exp of the scores from the forward pass, float32 [B, N, S].
        gradient: gradient of `out`, contiguous.
        deltas: float32 [B, N, S]; written.
        sink_parts: float32 [num_sink_parts, N], partial sums of the sink gradients; written. None: not needed.
    """
    batch, length, heads = problem.shape
    sinks, value_dim = sink_parts is not None, problem.v.shape[3]
    tensors = out, gradient, log_sums, problem.sinks if sinks else log_sums, deltas, sink_parts if sinks else deltas
    constants = {"SINKS": sinks, "VALUE_DIM": value_dim, "VALUE_CHANNELS": channels_of(value_dim)}
    sizes = sizes_for(DELTA_SIZES, problem)
    grid = (triton.cdiv(length, sizes["QUERIES"]), heads, batch)
    launch(attention_deltas_kernel, grid, *tensors, length, heads, **constants, **sizes)


def launch_query_gradient(
    launch: Callable[..., None],
    problem: Problem,
    walk: Walk,
    saved: tuple[Any, Any, Any],
    q_gradient: Any,
) -> None:
    """Launch the computation of dq.

    Args:
        launch, problem: see `launch_forward`.
        walk: tile sizes from `QUERY_SIZES`, and lists of tiles of keys.
        saved: do [B, S, N, E], contiguous; L and delta, float32 [B, N, S].
        q_gradient: dq, contiguous; written.
    """
    batch, length, heads = problem.shape
    tensors = problem.q, problem.k, problem.v, *mask_tensors(problem, walk), *saved, q_gradient
    grid = (triton.cdiv(length, walk.sizes["QUERIES"]), heads, batch)
    numbers = *factors(problem, walk), problem.scale
    launch(attention_queries_kernel, grid, *tensors, *numbers, **constants_of(problem), **walk.sizes)


def launch_key_gradients(
    launch: Callable[..., None],
    problem: Problem,
    walk: Walk,
    saved: tuple[Any, Any, Any],
    gradients: tuple[Any, Any],
) -> None:
    """Launch the computation of dk and dv.

    Args:
        launch, problem, saved: see `launch_query_gradient`.
        walk: tile sizes from `KEY_SIZES`, and lists of tiles of queries.
        gradients: dk and dv, contiguous; written.
    """
    batch, length, _ = problem.shape
    tensors = problem.q, problem.k, problem.v, *mask_tensors(problem, walk), *saved, *gradients
    grid = (triton.cdiv(length, walk.sizes["KEYS"]), problem.k.shape[2], batch)
    numbers = *factors(problem, walk), problem.scale
    launch(attention_keys_kernel, grid, *tensors, *numbers, **constants_of(problem), **walk.sizes)
