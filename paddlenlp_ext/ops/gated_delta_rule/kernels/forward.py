"""Forward pass of the recurrences: states before chunks, and outputs."""

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
    state_of,
)
from paddlenlp_ext.ops.gated_delta_rule.kernels.inputs import Problem, constants_of, tile_sizes

STATE_SIZES, OUTPUT_SIZES = (tile_sizes(f"recurrence_{name}") for name in ("states", "outputs"))


@triton.jit
def recurrence_states_kernel(
    k,  # [T, G, H]
    v,  # [T, N, E]; with DELTA T beta V, which U overwrites
    w,  # W [T, N, H], read only with DELTA
    decay,  # [T, N]
    first_states,  # float32 [R, N, H, E]: initial states, or the final states of parents
    chunks,
    documents,
    selected,  # int32, documents of this launch
    states,  # [M, N, H, E], states before the chunks
    final,  # float32 [R, N, H, E], states after the documents
    num_groups,
    num_heads,
    START: tl.constexpr,  # "zeros", "initial" or "parent"
    DELTA: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Compute VALUES columns of the states of one document and head."""
    column, n, document = tl.program_id(0) * VALUES, tl.program_id(1), tl.load(selected + tl.program_id(2))
    group = n // (num_heads // num_groups)
    dtype: tl.constexpr = k.dtype.element_ty
    end, inside = state_of(final, document, n, num_heads, column, KEY_DIM, VALUE_DIM, KEYS, VALUES)
    if START == "zeros":
        state = tl.zeros((KEYS, VALUES), dtype=tl.float32)
    else:
        source = tl.load(documents + document * 4 + 2) if START == "parent" else document
        start, _is_state = state_of(first_states, source, n, num_heads, column, KEY_DIM, VALUE_DIM, KEYS, VALUES)
        state = tl.load(start, mask=inside, other=0.0)
    for chunk in range(tl.load(documents + document * 4), tl.load(documents + document * 4 + 1)):
        before, _is_state = state_of(states, chunk, n, num_heads, column, KEY_DIM, VALUE_DIM, KEYS, VALUES)
        tl.store(before, state.to(states.dtype.element_ty), mask=inside)
        first, is_row = positions_of(chunks, chunk, CHUNK)
        _sums, _since_start, until_end, whole = chunk_decays(decay, first, is_row, n, num_heads)
        own_k = load_rows(k, first, is_row, group, num_groups, 0, KEY_DIM, KEYS)
        u = load_rows(v, first, is_row, n, num_heads, column, VALUE_DIM, VALUES)
        if DELTA:
            own_w = load_rows(w, first, is_row, n, num_heads, 0, KEY_DIM, KEYS)
            u = (u - tl.dot(own_w, state.to(dtype))).to(dtype)
            own, is_own = rows_of(v, first, is_row, n, num_heads, column, VALUE_DIM, VALUES)
            tl.store(own, u, mask=is_own)
        decayed_k = (own_k * until_end[:, None]).to(dtype)
        state = state * whole + tl.dot(tl.trans(decayed_k), u.to(dtype))
    tl.store(end, state, mask=inside)


@triton.jit
def recurrence_outputs_kernel(
    q,  # [T, G, H]
    k,  # [T, G, H]
    u,  # [T, N, E]
    decay,  # [T, N]
    states,  # [M, N, H, E]
    chunks,
    o,  # [T, N, E]
    num_groups,
    num_heads,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Compute VALUES columns of the outputs of one chunk and head."""
    chunk, n = tl.program_id(0), tl.program_id(1)
    group = n // (num_heads // num_groups)
    dtype: tl.constexpr = k.dtype.element_ty
    first, is_row = positions_of(chunks, chunk, CHUNK)
    sums, since_start, _until_end, _whole = chunk_decays(decay, first, is_row, n, num_heads)
    own_q = load_rows(q, first, is_row, group, num_groups, 0, KEY_DIM, KEYS)
    own_k = load_rows(k, first, is_row, group, num_groups, 0, KEY_DIM, KEYS)
    p = (tl.dot(own_q, tl.trans(own_k)) * lower_decays(sums, CHUNK)).to(dtype)
    for column in range(0, VALUE_DIM, VALUES):
        state, inside = state_of(states, chunk, n, num_heads, column, KEY_DIM, VALUE_DIM, KEYS, VALUES)
        before = tl.load(state, mask=inside, other=0.0)
        own_u = load_rows(u, first, is_row, n, num_heads, column, VALUE_DIM, VALUES).to(dtype)
        own_o = tl.dot(own_q, before) * since_start[:, None] + tl.dot(p, own_u)
        own, is_own = rows_of(o, first, is_row, n, num_heads, column, VALUE_DIM, VALUES)
        tl.store(own, own_o.to(o.dtype.element_ty), mask=is_own)


def launch_states(launch: Callable[..., None], problem: Problem, u: Any, w: Any, states: Any, final: Any) -> None:
    """Launch the kernel of the states for the documents without a parent, and then for the others.

    Args:
        launch: function that takes a kernel, its grid, its arguments and its constants.
        problem: inputs of the recurrence.
        u: V, or T beta V in the gated delta rule, which U overwrites.
        w: W [T, N, H]; None without beta.
        states: states before the chunks, [M, N, H, E]; written.
        final: states after the documents, float32 [R, N, H, E]; written.
    """
    constants, (num_groups, num_heads), lists = constants_of(problem, STATE_SIZES), problem.heads, problem.lists
    values = triton.cdiv(problem.v.shape[2], constants["VALUES"])
    start = "zeros" if problem.initial is None else "initial"
    first = final if problem.initial is None else problem.initial
    for own_start, first_states, selected in ((start, first, lists.roots), ("parent", final, lists.branches)):
        if selected.shape[0]:
            grid, delta = (values, num_heads, selected.shape[0]), problem.beta is not None
            inputs = problem.k, u, w if delta else problem.k, problem.decay, first_states
            outputs = lists.chunks, lists.documents, selected, states, final
            options = {"START": own_start, "DELTA": delta, **constants}
            launch(recurrence_states_kernel, grid, *inputs, *outputs, num_groups, num_heads, **options)


def launch_outputs(launch: Callable[..., None], problem: Problem, u: Any, states: Any, o: Any) -> None:
    """Launch the kernel of the outputs; the other arguments are described in `launch_states`.

    Args:
        u: U.
        o: [T, N, E]; written.
    """
    tensors = problem.q, problem.k, u, problem.decay, states, problem.lists.chunks, o
    grid = problem.num_chunks, problem.heads[1]
    launch(recurrence_outputs_kernel, grid, *tensors, *problem.heads, **constants_of(problem, OUTPUT_SIZES))
