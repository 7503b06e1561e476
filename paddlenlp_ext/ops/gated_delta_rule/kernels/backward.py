"""Backward pass of the recurrences: gradients of the states after chunks, and of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    state_of,
)
from paddlenlp_ext.ops.gated_delta_rule.kernels.inputs import Problem, constants_of, tile_sizes

STATE_SIZES, VALUE_SIZES, KEY_SIZES = (tile_sizes(f"recurrence_{name}_gradients") for name in ("state", "value", "key"))
MOST_HEADS = 4
"""Largest number of heads of a group whose gradients of q and k a program sums."""


@triton.jit
def recurrence_state_gradients_kernel(
    q,  # [T, G, H]
    k,  # [T, G, H]
    w,  # W [T, N, H], read only with DELTA
    decay,  # [T, N]
    o_gradient,  # [T, N, E]
    final_gradient,  # float32 [R, N, H, E]
    chunks,
    documents,
    selected,  # int32, documents of this launch
    state_gradients,  # [M, N, H, E], of the states after the chunks
    u_gradient,  # [T, N, E], written only with DELTA
    first_gradient,  # float32 [R, N, H, E], of the states before the documents
    num_groups,
    num_heads,
    HAS_BRANCHES: tl.constexpr,  # whether the gradients of the branches of each document are added, and set to 0
    DELTA: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Compute VALUES columns of the gradients of the states of one document and head."""
    column, n, document = tl.program_id(0) * VALUES, tl.program_id(1), tl.load(selected + tl.program_id(2))
    group = n // (num_heads // num_groups)
    dtype: tl.constexpr = k.dtype.element_ty
    of_final, inside = state_of(final_gradient, document, n, num_heads, column, KEY_DIM, VALUE_DIM, KEYS, VALUES)
    gradient = tl.load(of_final, mask=inside, other=0.0)
    if HAS_BRANCHES:
        for branch in range(document + 1, tl.load(documents + document * 4 + 3)):
            of_first, _is_state = state_of(
                first_gradient, branch, n, num_heads, column, KEY_DIM, VALUE_DIM, KEYS, VALUES
            )
            gradient += tl.load(of_first, mask=inside, other=0.0)
            tl.debug_barrier()  # several threads may load an element of a small tile
            tl.store(of_first, tl.zeros((KEYS, VALUES), dtype=tl.float32), mask=inside)
    begin, end = tl.load(documents + document * 4), tl.load(documents + document * 4 + 1)
    for index in range(end - begin):
        chunk = end - 1 - index
        of_after, _is_state = state_of(state_gradients, chunk, n, num_heads, column, KEY_DIM, VALUE_DIM, KEYS, VALUES)
        tl.store(of_after, gradient.to(state_gradients.dtype.element_ty), mask=inside)
        first, is_row = positions_of(chunks, chunk, CHUNK)
        sums, since_start, until_end, whole = chunk_decays(decay, first, is_row, n, num_heads)
        own_q = load_rows(q, first, is_row, group, num_groups, 0, KEY_DIM, KEYS)
        of_o = load_rows(o_gradient, first, is_row, n, num_heads, column, VALUE_DIM, VALUES).to(dtype)
        decayed_q = (own_q * since_start[:, None]).to(dtype)
        before = gradient * whole + tl.dot(tl.trans(decayed_q), of_o)
        if DELTA:
            own_k = load_rows(k, first, is_row, group, num_groups, 0, KEY_DIM, KEYS)
            own_w = load_rows(w, first, is_row, n, num_heads, 0, KEY_DIM, KEYS)
            p = (tl.dot(own_q, tl.trans(own_k)) * lower_decays(sums, CHUNK)).to(dtype)
            of_u = tl.dot(tl.trans(p), of_o) + tl.dot(own_k, gradient.to(dtype)) * until_end[:, None]
            of_u = of_u.to(dtype)
            rows, is_own = rows_of(u_gradient, first, is_row, n, num_heads, column, VALUE_DIM, VALUES)
            tl.store(rows, of_u, mask=is_own)
            before -= tl.dot(tl.trans(own_w), of_u)
        gradient = before
    of_first, _is_state = state_of(first_gradient, document, n, num_heads, column, KEY_DIM, VALUE_DIM, KEYS, VALUES)
    tl.store(of_first, gradient, mask=inside)


@triton.jit
def decay_gradients(m, by_start, by_end, of_whole, CHUNK: tl.constexpr):
    """Return the gradients of the decays of a chunk; `_Factors.gradients` of chunked_recurrence.py has the formula."""
    i = tl.arange(0, CHUNK)
    is_lower, is_strict = i[:, None] >= i[None, :], i[:, None] > i[None, :]
    of_decay = tl.sum(tl.where(is_strict, tl.cumsum(m, axis=0, reverse=True), 0.0), axis=1)
    of_decay += tl.sum(tl.where(is_lower, by_start[:, None], 0.0), axis=0)
    of_decay += tl.sum(tl.where(is_strict, by_end[None, :], 0.0), axis=1)
    return of_decay + of_whole


@triton.jit
def recurrence_value_gradients_kernel(
    q,  # [T, G, H]
    k,  # [T, G, H]
    v,  # [T, N, E]
    u,  # U [T, N, E]
    decay,  # [T, N]
    beta,  # [T, N], read only with DELTA
    inverse,  # T [M, N, C, C], read only with DELTA
    states,  # [M, N, H, E], before the chunks
    state_gradients,  # [M, N, H, E], of the states after the chunks
    o_gradient,  # [T, N, E]
    u_gradient,  # [T, N, E], read only with DELTA
    chunks,
    v_gradient,  # [T, N, E]
    decay_gradient,  # [T, N]
    beta_gradient,  # [T, N], written only with DELTA
    qk_gradient,  # [M, N, C, C], of Q K^T
    kk_gradient,  # [M, N, C, C], of K K^T, plus its transpose; written only with DELTA
    num_groups,
    num_heads,
    DELTA: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Compute the gradients of v, the decays, beta and the products of keys for one chunk and head."""
    chunk, n = tl.program_id(0), tl.program_id(1)
    group = n // (num_heads // num_groups)
    dtype: tl.constexpr = k.dtype.element_ty
    i = tl.arange(0, CHUNK)
    is_lower, is_strict = i[:, None] >= i[None, :], i[:, None] > i[None, :]
    first, is_row = positions_of(chunks, chunk, CHUNK)
    sums, since_start, until_end, whole = chunk_decays(decay, first, is_row, n, num_heads)
    of_p = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    by_start, by_end = tl.zeros((CHUNK,), dtype=tl.float32), tl.zeros((CHUNK,), dtype=tl.float32)
    by_whole = tl.zeros((VALUES,), dtype=tl.float32)
    of_a, of_beta = tl.zeros((CHUNK, CHUNK), dtype=tl.float32), tl.zeros((CHUNK,), dtype=tl.float32)
    for column in range(0, VALUE_DIM, VALUES):
        # Loaded again for each tile: operands that stay in registers during the loop would be spilled.
        own_q = load_rows(q, first, is_row, group, num_groups, 0, KEY_DIM, KEYS)
        own_k = load_rows(k, first, is_row, group, num_groups, 0, KEY_DIM, KEYS)
        own_u = load_rows(u, first, is_row, n, num_heads, column, VALUE_DIM, VALUES).to(dtype)
        of_o = load_rows(o_gradient, first, is_row, n, num_heads, column, VALUE_DIM, VALUES).to(dtype)
        state, inside = state_of(states, chunk, n, num_heads, column, KEY_DIM, VALUE_DIM, KEYS, VALUES)
        before = tl.load(state, mask=inside, other=0.0)
        state, _is_state = state_of(state_gradients, chunk, n, num_heads, column, KEY_DIM, VALUE_DIM, KEYS, VALUES)
        of_after = tl.load(state, mask=inside, other=0.0)
        by_whole += tl.sum(before.to(tl.float32) * of_after.to(tl.float32), axis=0)
        of_p += tl.dot(of_o, tl.trans(own_u))
        by_start += tl.sum(of_o * tl.dot(own_q, before), axis=1) * since_start
        by_k = tl.dot(own_k, of_after) * until_end[:, None]
        by_end += tl.sum(own_u * by_k, axis=1)
        if DELTA:
            own_beta = tl.load(scalars_of(beta, first, is_row, n, num_heads), mask=is_row, other=0.0)
            of_u = load_rows(u_gradient, first, is_row, n, num_heads, column, VALUE_DIM, VALUES)
            z = tl.dot(tl.trans(tl.load(square_of(inverse, chunk, n, num_heads, CHUNK))), of_u)
            of_a -= tl.dot(z.to(dtype), tl.trans(own_u))
            of_v = z * own_beta[:, None]
            read = tl.dot(own_k, before) * since_start[:, None]
            own_v = load_rows(v, first, is_row, n, num_heads, column, VALUE_DIM, VALUES)
            of_beta += tl.sum(z * (own_v - read), axis=1)
            by_start -= tl.sum(of_v * read, axis=1)
        else:
            p = (tl.dot(own_q, tl.trans(own_k)) * lower_decays(sums, CHUNK)).to(dtype)
            of_v = tl.dot(tl.trans(p), of_o) + by_k
        rows, is_own = rows_of(v_gradient, first, is_row, n, num_heads, column, VALUE_DIM, VALUES)
        tl.store(rows, of_v.to(v_gradient.dtype.element_ty), mask=is_own)
    own_q = load_rows(q, first, is_row, group, num_groups, 0, KEY_DIM, KEYS)
    own_k = load_rows(k, first, is_row, group, num_groups, 0, KEY_DIM, KEYS)
    d = lower_decays(sums, CHUNK)
    of_qk = tl.where(is_lower, of_p, 0.0) * d
    tl.store(square_of(qk_gradient, chunk, n, num_heads, CHUNK), of_qk.to(dtype))
    m = of_qk * tl.dot(own_q, tl.trans(own_k))
    if DELTA:
        kk = tl.dot(own_k, tl.trans(own_k))
        own_beta = tl.load(scalars_of(beta, first, is_row, n, num_heads), mask=is_row, other=0.0)
        of_kk = tl.where(is_strict, of_a, 0.0) * d
        of_beta += tl.sum(of_kk * kk, axis=1)
        of_kk *= own_beta[:, None]
        m += of_kk * kk
        tl.store(square_of(kk_gradient, chunk, n, num_heads, CHUNK), (of_kk + tl.trans(of_kk)).to(dtype))
        tl.store(scalars_of(beta_gradient, first, is_row, n, num_heads), of_beta, mask=is_row)
    of_decay = decay_gradients(m, by_start, by_end, tl.sum(by_whole, axis=0) * whole, CHUNK)
    tl.store(scalars_of(decay_gradient, first, is_row, n, num_heads), of_decay, mask=is_row)


@triton.jit
def recurrence_key_gradients_kernel(
    q,  # [T, G, H]
    k,  # [T, G, H]
    u,  # U [T, N, E]
    decay,  # [T, N]
    states,  # [M, N, H, E], before the chunks
    state_gradients,  # [M, N, H, E], of the states after the chunks
    o_gradient,  # [T, N, E]
    v_gradient,  # [T, N, E], read only with DELTA
    qk_gradient,  # [M, N, C, C], of Q K^T
    kk_gradient,  # [M, N, C, C], of K K^T, plus its transpose; read only with DELTA
    chunks,
    q_gradient,  # [parts, T, G, H]
    k_gradient,  # [parts, T, G, H]
    num_positions,
    num_groups,
    num_heads,
    DELTA: tl.constexpr,
    HEADS: tl.constexpr,  # heads of a program
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Compute the gradients of q and k of one chunk and group, summed over some of the group's heads."""
    chunk, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    per_group = num_heads // num_groups
    dtype: tl.constexpr = k.dtype.element_ty
    first, is_row = positions_of(chunks, chunk, CHUNK)
    of_q, of_k = tl.zeros((CHUNK, KEYS), dtype=tl.float32), tl.zeros((CHUNK, KEYS), dtype=tl.float32)
    for n in range(group * per_group + part * HEADS, group * per_group + tl.minimum((part + 1) * HEADS, per_group)):
        _sums, since_start, until_end, _whole = chunk_decays(decay, first, is_row, n, num_heads)
        for column in range(0, VALUE_DIM, VALUES):
            state, inside = state_of(states, chunk, n, num_heads, column, KEY_DIM, VALUE_DIM, KEYS, VALUES)
            before = tl.trans(tl.load(state, mask=inside, other=0.0))
            of_o = load_rows(o_gradient, first, is_row, n, num_heads, column, VALUE_DIM, VALUES)
            of_q += tl.dot((of_o * since_start[:, None]).to(dtype), before)
            if DELTA:
                of_v = load_rows(v_gradient, first, is_row, n, num_heads, column, VALUE_DIM, VALUES)
                of_k -= tl.dot((of_v * since_start[:, None]).to(dtype), before)
            own_u = load_rows(u, first, is_row, n, num_heads, column, VALUE_DIM, VALUES)
            state, _is_state = state_of(state_gradients, chunk, n, num_heads, column, KEY_DIM, VALUE_DIM, KEYS, VALUES)
            of_after = tl.trans(tl.load(state, mask=inside, other=0.0))
            of_k += tl.dot((own_u * until_end[:, None]).to(dtype), of_after)
        own_k = load_rows(k, first, is_row, group, num_groups, 0, KEY_DIM, KEYS)
        of_qk = tl.load(square_of(qk_gradient, chunk, n, num_heads, CHUNK))
        of_q += tl.dot(of_qk, own_k)
        if DELTA:
            of_k += tl.dot(tl.load(square_of(kk_gradient, chunk, n, num_heads, CHUNK)), own_k)
        own_q = load_rows(q, first, is_row, group, num_groups, 0, KEY_DIM, KEYS)
        of_k += tl.dot(tl.trans(of_qk), own_q)
    position = part * num_positions + first  # in all parts
    rows, is_own = rows_of(q_gradient, position, is_row, group, num_groups, 0, KEY_DIM, KEYS)
    tl.store(rows, of_q.to(q_gradient.dtype.element_ty), mask=is_own)
    rows, _is_own = rows_of(k_gradient, position, is_row, group, num_groups, 0, KEY_DIM, KEYS)
    tl.store(rows, of_k.to(k_gradient.dtype.element_ty), mask=is_own)


def launch_state_gradients(
    launch: Callable[..., None],
    problem: Problem,
    w: Any,
    o_gradient: Any,
    final_gradient: Any,
    state_gradients: Any,
    u_gradient: Any,
    first_gradient: Any,
) -> None:
    """Launch the kernel of the state gradients for the documents with a parent, and then for the others.

    Args:
        launch: function that takes a kernel, its grid, its arguments and its constants.
        problem: inputs of the recurrence.
        w: W [T, N, H]; None without beta.
        o_gradient: gradient of the outputs, [T, N, E].
        final_gradient: gradient of the final states, float32 [R, N, H, E].
        state_gradients: gradients of the states after the chunks, [M, N, H, E]; written.
        u_gradient: gradient of U, [T, N, E]; written with beta, otherwise None.
        first_gradient: gradients of the initial states, float32 [R, N, H, E], 0 for documents with a parent; written.
    """
    constants, heads, lists = constants_of(problem, STATE_SIZES), problem.heads, problem.lists
    values, delta = triton.cdiv(problem.v.shape[2], constants["VALUES"]), problem.beta is not None
    unused = problem.k  # in place of tensors that only the gated delta rule has
    inputs = problem.q, problem.k, w if delta else unused, problem.decay, o_gradient, final_gradient
    for selected in (lists.branches, lists.roots):
        if selected.shape[0]:
            grid, outputs = (values, heads[1], selected.shape[0]), (state_gradients, u_gradient if delta else unused)
            has_branches = selected is lists.roots and bool(lists.branches.shape[0])
            options = {"HAS_BRANCHES": has_branches, "DELTA": delta, **constants}
            tensors = *inputs, lists.chunks, lists.documents, selected, *outputs, first_gradient
            launch(recurrence_state_gradients_kernel, grid, *tensors, *heads, **options)


def num_parts(problem: Problem) -> int:
    """Return the number of partial sums of the gradients of q and k."""
    num_groups, num_heads = problem.heads
    return triton.cdiv(num_heads // num_groups, MOST_HEADS)


def launch_value_gradients(
    launch: Callable[..., None],
    problem: Problem,
    saved: Sequence[Any],
    gradients: Sequence[Any],
) -> None:
    """Launch the kernel of the gradients of v, the decays and beta (`launch_state_gradients` has the other arguments).

    Args:
        saved: U; T or None; states before the chunks; gradients of the states after the chunks, of the outputs, and of
            U or None.
        gradients: gradients of v, the decays, beta, Q K^T [M, N, C, C], and K K^T plus its transpose. The gradients of
            beta and K K^T are None without beta. Written.
    """
    u, inverse, *others = saved
    inputs = problem.q, problem.k, problem.v, u, problem.decay, problem.beta, inverse, *others
    tensors = (problem.k if x is None else x for x in (*inputs, problem.lists.chunks, *gradients))
    options = {"DELTA": problem.beta is not None, **constants_of(problem, VALUE_SIZES)}
    grid = problem.num_chunks, problem.heads[1]
    launch(recurrence_value_gradients_kernel, grid, *tensors, *problem.heads, **options)


def launch_key_gradients(
    launch: Callable[..., None],
    problem: Problem,
    saved: Sequence[Any],
    gradients: Sequence[Any],
) -> None:
    """Launch the kernel of the gradients of q and k (`launch_state_gradients` has the other arguments).

    Args:
        saved: U; states before the chunks; gradients of the states after the chunks, of the outputs, v, Q K^T, and
            K K^T or None.
        gradients: gradients of q and k, [num_parts, T, G, H]; written.
    """
    (num_groups, num_heads), (u, *others) = problem.heads, saved
    inputs = problem.q, problem.k, u, problem.decay, *others
    tensors = (problem.k if x is None else x for x in (*inputs, problem.lists.chunks, *gradients))
    grid, numbers = (problem.num_chunks, num_groups, num_parts(problem)), (problem.q.shape[0], num_groups, num_heads)
    options = {"DELTA": problem.beta is not None, "HEADS": MOST_HEADS, **constants_of(problem, KEY_SIZES)}
    launch(recurrence_key_gradients_kernel, grid, *tensors, *numbers, **options)
