"""Triton kernel of the attention forward pass, which computes outputs and log-sum-exps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from paddlenlp_ext.ops.attention.kernels.inputs import Problem, Walk, constants_of, factors, mask_tensors, tile_sizes
from paddlenlp_ext.ops.attention.kernels.tiles import LOG2_E, load_rows, rows_of_head, scores_of, store_rows, tiles_of

SIZES = tile_sizes("attention_forward")


@triton.jit
def _forward_tile(
    sums, largest, total, own_q, k, v, start_rows, first, m, length, k_stride, v_stride, inner, outer, slope,
    CAPPED: tl.constexpr, BIASED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CHANNELS: tl.constexpr, VALUE_CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Update outputs, largest scores and sums of exponentials of queries m with a tile of keys (online softmax)."""
    n = first + tl.arange(0, KEYS)
    own_k = load_rows(k, first, length, k_stride, KEYS, HEAD_DIM, CHANNELS, MASKED)
    x = tl.dot(own_q, tl.trans(own_k), input_precision=PRECISION)
    starts = n
    if MASKED:
        starts = tl.load(start_rows + n, mask=n < length, other=0)
    x, _ = scores_of(x, m[:, None], n[None, :], starts[None, :], inner, outer, slope, CAPPED, BIASED, MASKED)
    factor = 1.0 if BIASED else outer
    new = tl.maximum(largest, tl.max(x, axis=1) * factor)
    shift = new
    if MASKED:
        shift = tl.where(new == float("-inf"), 0.0, new)  # no key in the tiles so far is visible to the query
    p = tl.exp2(x * factor - shift[:, None])
    shrink = tl.exp2(largest - shift)
    total = total * shrink + tl.sum(p, axis=1)
    own_v = load_rows(v, first, length, v_stride, KEYS, VALUE_DIM, VALUE_CHANNELS, MASKED)
    sums = tl.dot(p.to(own_v.dtype), own_v, sums * shrink[:, None], input_precision=PRECISION)
    return sums, new, total


@triton.jit
def attention_forward_kernel(
    q,  # [B, S, N, H]
    k,  # [B, S, K, H]
    v,  # [B, S, K, E]
    sinks,  # float32 [N], read only if SINKS
    slopes,  # float32 [N], read only if BIASED
    start_rows,  # int32 [B, S]
    indices,  # int32 [B, tiles, width]
    counts,  # int32 [B, tiles, 2]
    out,  # [B, S, N, E], written
    log_sums,  # L, float32 [B, N, S], written
    length,  # S
    num_heads,  # N
    group,  # N / K
    width,
    inner,
    outer,
    CAPPED: tl.constexpr,
    BIASED: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # H and E
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,  # H and E, rounded up to powers of two
    VALUE_CHANNELS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute the outputs of a tile of queries of one head; the last tiles, often with the most keys, start first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_heads, position = num_heads // group, row * length
    k, k_stride = rows_of_head(k, position, kv_heads, head // group, HEAD_DIM)
    v, v_stride = rows_of_head(v, position, kv_heads, head // group, VALUE_DIM)
    q, q_stride = rows_of_head(q, position, num_heads, head, HEAD_DIM)
    out, out_stride = rows_of_head(out, position, num_heads, head, VALUE_DIM)
    first = tile * QUERIES
    m = first + tl.arange(0, QUERIES)
    own_q = load_rows(q, first, length, q_stride, QUERIES, HEAD_DIM, CHANNELS, True)
    slope = tl.load(slopes + head) * LOG2_E if BIASED else 0.0
    largest = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    if SINKS:
        largest = total + tl.load(sinks + head) * LOG2_E
        total += 1.0
    sums = tl.zeros((QUERIES, VALUE_CHANNELS), dtype=tl.float32)
    indices, full, every = tiles_of(indices, counts, row, tile, width)
    start_rows += position
    for masked in tl.static_range(2):
        for index in range(full if masked else 0, every if masked else full):
            sums, largest, total = _forward_tile(
                sums, largest, total, own_q, k, v, start_rows, tl.load(indices + index) * KEYS, m, length, k_stride,
                v_stride, inner, outer, slope, CAPPED, BIASED, masked, PRECISION, HEAD_DIM, VALUE_DIM, CHANNELS,
                VALUE_CHANNELS, KEYS,
            )  # fmt: skip
    total = tl.where(m < length, total, 1.0)
    store_rows(out, sums / total[:, None], first, length, out_stride, QUERIES, VALUE_DIM, VALUE_CHANNELS)
    tl.store(log_sums + (row * num_heads + head) * length + m, largest + tl.log2(total), mask=m < length)


def launch_forward(launch: Callable[..., None], problem: Problem, walk: Walk, out: Any, log_sums: Any) -> None:
    """Launch the forward pass.

    Args:
        launch: function that takes a kernel, its grid, its arguments and its constants.
        problem: inputs of the attention.
        walk: tile sizes from `SIZES`, and for each tile of queries the list of key tiles to visit.
        out: [B, S, N, E], contiguous; written.
        log_sums: float32 [B, N, S]; written.
    """
    batch, length, heads = problem.shape
    sinks = problem.q if problem.sinks is None else problem.sinks
    tensors = problem.q, problem.k, problem.v, sinks, *mask_tensors(problem, walk), out, log_sums
    constants = {"SINKS": problem.sinks is not None, **constants_of(problem), **walk.sizes}
    grid = (triton.cdiv(length, walk.sizes["QUERIES"]), heads, batch)
    launch(attention_forward_kernel, grid, *tensors, *factors(problem, walk), **constants)
