"""Parts of the gated delta rule that do not depend on states: T, W and T beta V of each chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from paddlenlp_ext.ops.gated_delta_rule.kernels.chunks import (
    chunk_decays,
    load_rows,
    lower_decays,
    positions_of,
    rows_of,
    scalars_of,
    square_of,
    unit_lower_inverse,
)
from paddlenlp_ext.ops.gated_delta_rule.kernels.inputs import Problem, constants_of, tile_sizes

SIZES = tile_sizes("delta_rule_updates")


@triton.jit
def delta_rule_updates_kernel(
    k,  # [T, G, H]
    v,  # [T, N, E]
    decay,  # [T, N]
    beta,  # [T, N]
    chunks,
    inverse,  # T [M, N, C, C]
    w,  # [T, N, H]
    u,  # T beta V [T, N, E]
    num_groups,
    num_heads,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Compute T, W and T beta V of one chunk and head."""
    chunk, n = tl.program_id(0), tl.program_id(1)
    group = n // (num_heads // num_groups)
    dtype: tl.constexpr = k.dtype.element_ty
    i = tl.arange(0, CHUNK)
    first, is_row = positions_of(chunks, chunk, CHUNK)
    sums, since_start, _until_end, _whole = chunk_decays(decay, first, is_row, n, num_heads)
    own_k = load_rows(k, first, is_row, group, num_groups, 0, KEY_DIM, KEYS)
    own_beta = tl.load(scalars_of(beta, first, is_row, n, num_heads), mask=is_row, other=0.0)
    a = tl.dot(own_k, tl.trans(own_k)) * lower_decays(sums, CHUNK) * own_beta[:, None]
    solved = unit_lower_inverse(tl.where(i[:, None] > i[None, :], a, 0.0), CHUNK).to(dtype)
    tl.store(square_of(inverse, chunk, n, num_heads, CHUNK), solved)
    own_k = load_rows(k, first, is_row, group, num_groups, 0, KEY_DIM, KEYS)  # again, to save registers
    w_rows, is_w = rows_of(w, first, is_row, n, num_heads, 0, KEY_DIM, KEYS)
    own_w = tl.dot(solved, (own_k * (own_beta * since_start)[:, None]).to(dtype))
    tl.store(w_rows, own_w.to(dtype), mask=is_w)
    for column in range(0, VALUE_DIM, VALUES):
        own_v = load_rows(v, first, is_row, n, num_heads, column, VALUE_DIM, VALUES)
        rows, inside = rows_of(u, first, is_row, n, num_heads, column, VALUE_DIM, VALUES)
        tl.store(rows, tl.dot(solved, (own_v * own_beta[:, None]).to(dtype)).to(dtype), mask=inside)


def launch_updates(launch: Callable[..., None], problem: Problem, inverse: Any, w: Any, u: Any) -> None:
    """Launch the kernel.

    Args:
        launch: function that takes a kernel, its grid, its arguments and its constants.
        problem: inputs of the gated delta rule.
        inverse: T [M, N, C, C]; written.
        w: W [T, N, H]; written.
        u: T beta V [T, N, E]; written.
    """
    tensors = problem.k, problem.v, problem.decay, problem.beta, problem.lists.chunks, inverse, w, u
    grid = problem.num_chunks, problem.heads[1]
    launch(delta_rule_updates_kernel, grid, *tensors, *problem.heads, **constants_of(problem, SIZES))
