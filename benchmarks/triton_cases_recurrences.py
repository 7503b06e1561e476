"""Cases of benchmarks/triton_ops.py: convolutions and recurrences of packed documents."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.triton_cases import BF16, F32, Case, Entry, Op, Peer, leaf, num_bytes
from benchmarks.triton_torch import launch, load
from paddlenlp_ext.ops.triton_utils.column_sums import launch_column_sums
from tests.common.scripts import bare_packages

with bare_packages("gated_delta_rule"):
    from paddlenlp_ext.ops.gated_delta_rule.kernels import passes
    from paddlenlp_ext.ops.gated_delta_rule.kernels.chunk_lists import chunk_lists
    from paddlenlp_ext.ops.gated_delta_rule.kernels.inputs import Problem, chunk_size
    from paddlenlp_ext.ops.gated_delta_rule.kernels.unit_vectors import launch_unit_vectors

CONVOLUTION, READERS = (load(f"causal_convolution/{name}.py") for name in ("kernels", "readers"))
CHUNK, EPSILON = 64, 1e-6
HALF = (torch.float16, BF16)
"""Dtypes of the checks of recurrences: float32 is multiplied in TF32 on a GPU."""
PACKED = (1800, 350, 2600, 90, 1200, 700, 1000, 452)
"""Lengths of packed documents, together 8192 positions."""


class Convolution(torch.autograd.Function):
    """Causal convolution of x [T, D] with a weight [D, L]; `tables` are the taps and their readers."""

    @staticmethod
    def forward(ctx, x, weight, tables):
        y, transposed = torch.empty_like(x), weight.t().contiguous()
        CONVOLUTION.launch_forward(launch, x, transposed, None, tables[0], y)
        ctx.save_for_backward(x, transposed)
        ctx.tables = tables
        return y

    @staticmethod
    def backward(ctx, gradient):
        (x, weight), (taps, starts, entries), gradient = ctx.saved_tensors, ctx.tables, gradient.contiguous()
        x_gradient, weight_gradient = torch.empty_like(x), torch.empty_like(weight)
        CONVOLUTION.launch_input_gradient(launch, gradient, weight, starts, entries, x_gradient)
        partials = torch.empty(CONVOLUTION.num_parts(gradient), *weight.shape, device=x.device)
        CONVOLUTION.launch_weight_gradient(launch, gradient, x, taps, partials)
        launch_column_sums(launch, partials.flatten(1), weight_gradient)
        return x_gradient, weight_gradient.t(), None


def causal_convolution(dtype: torch.dtype, device: str, channels: int, num_taps: int, documents: Sequence[int]) -> Case:
    """Return the case of a convolution of packed documents."""
    count, lengths = sum(documents), np.array(documents)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    rows = np.arange(count)[:, None] - np.arange(num_taps)[::-1]
    rows = np.where(rows < starts[:, None], count, rows)
    tables = [torch.from_numpy(each.astype(np.int32)).to(device) for each in (rows, *READERS.readers_of(rows, count))]
    x, weight = (leaf(*shape, dtype=dtype, device=device) for shape in ((count, channels), (channels, num_taps)))

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return Convolution.apply(x, weight, tables)

    def formula(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        def convolved(part: torch.Tensor) -> torch.Tensor:
            padded = F.pad(part.t(), (num_taps - 1, 0))
            return F.conv1d(padded[None], weight[:, None], groups=channels)[0].t()

        return torch.cat([convolved(part) for part in x.split(list(documents))])

    def peer() -> Op:
        from causal_conv1d import causal_conv1d_fn

        index = torch.arange(len(documents), dtype=torch.int32, device=device)
        of_documents = index.repeat_interleave(torch.tensor(documents, device=device))[None]

        def run(x: torch.Tensor, weight: torch.Tensor) -> Any:
            return causal_conv1d_fn(x[None].transpose(1, 2), weight, seq_idx=of_documents)[0].t()

        return run

    moved = num_bytes(x, x), num_bytes(x, x, x)
    return Case([x, weight], ours, formula, Peer("causal_conv1d", peer), *moved)


class Recurrence(torch.autograd.Function):
    """Recurrence of q, k [T, G, H], v [T, N, E], decays [T, N] and beta [T, N] or None, as in the Triton backend."""

    @staticmethod
    def forward(ctx, lists, q, k, v, decay, beta):
        ctx.save_for_backward(q, k, v, decay, beta)
        ctx.lists = lists
        return passes.forward(LIBRARY, _problem(lists, q, k, v, decay, beta))[0]

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, decay, beta = ctx.saved_tensors
        problem = _problem(ctx.lists, q, k, v, decay, beta)
        of_final = torch.zeros(problem.num_documents, *problem.state, device=q.device)
        of_q, of_k, *others, _ = passes.backward(LIBRARY, problem, gradient.contiguous(), of_final)
        of_q, of_k = (x.sum(0).to(q.dtype) for x in (of_q, of_k))
        if beta is not None:
            of_q, of_k = _scaled(q, q.shape[2] ** -0.5, of_q), _scaled(k, 1.0, of_k)
        return None, of_q, of_k, *others


def _empty(x: torch.Tensor, shape: Sequence[int], in_float32: bool) -> torch.Tensor:
    return torch.empty(list(shape), dtype=F32 if in_float32 else x.dtype, device=x.device)


LIBRARY = passes.Library(launch, _empty)


def _problem(lists: Any, q: torch.Tensor, k: torch.Tensor, *others: Any) -> Problem:
    """Return the inputs of the kernels; the gated delta rule has normalized queries and keys."""
    if others[-1] is not None:
        q, k = _scaled(q, q.shape[2] ** -0.5), _scaled(k, 1.0)
    return Problem(q, k, *others, None, lists)


def _scaled(x: torch.Tensor, scale: float, gradient: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.empty_like(x)
    launch_unit_vectors(launch, x, out, scale, EPSILON, gradient)
    return out


def _by_chunk(x: torch.Tensor) -> torch.Tensor:
    """Return [N, ..., M, C] as [M, N, C, ...]."""
    return x.movedim((-2, -1), (0, 2))


def recurrence_formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor | None
) -> torch.Tensor:
    """Return the outputs of one document in chunks of 64, in float32 or float64, as transformers computes them."""
    wide, count = torch.float64 if q.dtype == torch.float64 else F32, len(q)
    q, k = (x.to(wide).repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    if beta is not None:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON) for x in (q, k))
        q = q * q.shape[2] ** -0.5
    inputs = [x.to(wide) for x in (q, k, v, decay, *(() if beta is None else (beta,)))]
    padding = -count % CHUNK
    padded = (F.pad(x.movedim(0, -1), (0, padding)).unflatten(-1, (-1, CHUNK)) for x in inputs)
    q, k, v, decay, *beta = (_by_chunk(x) for x in padded)
    sums = decay.cumsum(-1)
    d = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).tril().exp().tril()
    since, until, whole = sums.exp().unsqueeze(-1), (sums[..., -1:] - sums).exp().unsqueeze(-1), sums[..., -1].exp()
    p, w = d * (q @ k.mT), None
    if beta:
        strength = beta[0].unsqueeze(-1)
        a = (strength * d * (k @ k.mT)).tril(-1)
        solve = torch.linalg.solve_triangular
        eye = torch.eye(CHUNK, dtype=wide, device=q.device)
        v, w = (solve(eye + a, x, upper=False, unitriangular=True) for x in (strength * v, strength * since * k))
    state, outputs = torch.zeros(*k.shape[1:2], k.shape[3], v.shape[3], dtype=wide, device=q.device), []
    for chunk in range(len(q)):
        u = v[chunk] if w is None else v[chunk] - w[chunk] @ state
        outputs.append(since[chunk] * (q[chunk] @ state) + p[chunk] @ u)
        state = whole[chunk][:, None, None] * state + (until[chunk] * k[chunk]).mT @ u
    return torch.stack(outputs).movedim(2, 1).flatten(0, 1)[:count]


def recurrence(dtype: torch.dtype, device: str, sizes: Sequence[int], documents: Sequence[int], has_beta: bool) -> Case:
    """Return the case of a recurrence over packed documents; sizes: key heads, heads, key and value dimension."""
    groups, heads, key_dim, value_dim = sizes
    count, lengths = sum(documents), np.array(documents)
    size = chunk_size(2 if dtype != F32 else 4, int(lengths.max()))
    numbers = chunk_lists(np.cumsum(lengths) - lengths, lengths, np.full(len(lengths), -1), size)
    lists = numbers.converted(lambda x: torch.from_numpy(x).to(device))
    q, k = (leaf(count, groups, key_dim, dtype=dtype, device=device) for _ in range(2))
    v = leaf(count, heads, value_dim, dtype=dtype, device=device)
    decay = (-(10 ** (3 * torch.rand(count, heads, device=device) - 3))).requires_grad_()
    beta = [torch.rand(count, heads, device=device).requires_grad_()] if has_beta else []
    starts = torch.tensor([0, *documents], device=device).cumsum(0)

    def ours(*inputs: torch.Tensor) -> torch.Tensor:
        return Recurrence.apply(lists, *inputs, *([] if has_beta else [None]))

    def formula(*inputs: torch.Tensor) -> torch.Tensor:
        parts = zip(*(x.split(list(documents)) for x in inputs), strict=True)
        beta = () if has_beta else (None,)
        return torch.cat([recurrence_formula(*part, *beta) for part in parts]).to(inputs[2].dtype)

    def fla() -> Op:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            batched = (x[None] for x in inputs)
            return chunk_gated_delta_rule(*batched, use_qk_l2norm_in_kernel=True, cu_seqlens=starts)[0][0]

        return run

    def mamba() -> Op:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        index = torch.arange(len(documents), dtype=torch.int32, device=device)
        of_documents = index.repeat_interleave(torch.tensor(documents, device=device))[None]

        def run(c: torch.Tensor, b: torch.Tensor, dx: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
            # The step size is -decay with A = -1, so x is divided by the step size.
            x = (dx / -decay.unsqueeze(-1)).to(dx.dtype)
            rates = -torch.ones(heads, device=device)
            return mamba_chunk_scan_combined(x[None], -decay[None], rates, b[None], c[None], 256, seq_idx=of_documents)[
                0
            ]

        return run

    per_head = CHUNK * (2 * key_dim + (3 if has_beta else 1) * value_dim) + 4 * key_dim * value_dim
    operations = count * heads * per_head
    peer = Peer("fla", fla) if has_beta else Peer("mamba_ssm", mamba)
    inputs = [q, k, v, decay, *beta]
    return Case(inputs, ours, formula, peer, operations=4 * operations, forward_operations=operations)


OPS = {
    "causal_convolution": Entry(
        causal_convolution,
        {"qwen3.5_4b": (BF16, 8192, 4, PACKED), "lfm2_1.2b": (BF16, 2048, 3, PACKED)},
        [(37, 4, (9, 1, 26)), (130, 3, (35,))],
        (F32, torch.float16, BF16),
    ),
    "gated_delta_rule": Entry(
        functools.partial(recurrence, has_beta=True),
        {"qwen3.5_4b": (BF16, (16, 32, 128, 128), (8192,)), "qwen3.5_4b_packed": (BF16, (16, 32, 128, 128), PACKED)},
        [((1, 2, 20, 24), (9, 66))],
        HALF,
    ),
    "state_space_duality": Entry(
        functools.partial(recurrence, has_beta=False),
        {
            "granite4_h_micro": (BF16, (1, 48, 128, 64), (8192,)),
            "granite4_h_micro_packed": (BF16, (1, 48, 128, 64), PACKED),
        },
        [((1, 2, 20, 24), (9, 66))],
        HALF,
    ),
}
