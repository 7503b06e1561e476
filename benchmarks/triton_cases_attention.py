"""Attention cases of benchmarks/triton_ops.py: soft-caps, windows, sinks, linear biases and packed documents.

Operations are counted only for visible pairs of a query and a key. The compiled program is PyTorch's flex_attention.
The peer is PyTorch's scaled_dot_product_attention (SDPA), if SDPA supports the options of the case.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from benchmarks.triton_cases import BF16, Case, Entry, Op, Peer, leaf
from benchmarks.triton_torch import launch
from paddlenlp_ext.ops.triton_utils.column_sums import launch_column_sums
from paddlenlp_ext.ops.triton_utils.tile_sizes import TileSizes
from tests.common.scripts import bare_packages

with bare_packages("attention"):
    from paddlenlp_ext.ops.attention.kernels import backward, forward
    from paddlenlp_ext.ops.attention.kernels.inputs import Problem, Walk, sizes_for
    from paddlenlp_ext.ops.attention.kernels.tile_lists import tile_lists


class Mask:
    """Visibility of keys in one row of documents, with a sliding window or without."""

    def __init__(self, documents: Sequence[int], window: int | None, device: str) -> None:
        lengths = np.array(documents)
        ends = np.repeat(np.cumsum(lengths), lengths)
        if window is not None:
            ends = np.minimum(ends, np.arange(len(ends)) + window)
        self.rows = ends.astype(np.int32)[None]
        self.start_rows = torch.from_numpy(self.rows).to(device)
        self.num_pairs = int((ends - np.arange(len(ends))).sum())
        self._walks: dict[tuple[int, ...], Walk] = {}

    def walk(self, table: TileSizes, problem: Problem, of_keys: bool = False) -> Walk:
        """Return the tile sizes and tile lists of a kernel; the lists are built once."""
        sizes = sizes_for(table, problem)
        tile = sizes["QUERIES"], sizes["KEYS"], of_keys
        if tile not in self._walks:
            lists = (torch.from_numpy(each).to(problem.q.device) for each in tile_lists(self.rows, *tile))
            self._walks[tile] = Walk(sizes, *lists)
        return self._walks[tile]

    def dense(self) -> torch.Tensor:
        """Return a boolean mask [S, S]."""
        positions = torch.arange(self.rows.shape[1], device=self.start_rows.device)
        return (positions <= positions[:, None]) & (positions[:, None] < self.start_rows)


class Attention(torch.autograd.Function):
    """Attention of q [1, S, N, H], k [1, S, K, H], v [1, S, K, E] and sinks [N] or None, as in the Triton backend."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, mask, options):
        problem = Problem(q, k, v, mask.start_rows, sinks=sinks, **options)
        batch, length, heads = problem.shape
        out = torch.empty(batch, length, heads, v.shape[3], dtype=q.dtype, device=q.device)
        log_sums = torch.empty(batch, heads, length, device=q.device)
        forward.launch_forward(launch, problem, mask.walk(forward.SIZES, problem), out, log_sums)
        ctx.save_for_backward(q, k, v, sinks, out, log_sums)
        ctx.mask, ctx.options = mask, options
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, sinks, out, log_sums = ctx.saved_tensors
        problem, gradient = Problem(q, k, v, ctx.mask.start_rows, sinks=sinks, **ctx.options), gradient.contiguous()
        gradients, deltas = [torch.empty_like(each) for each in (q, k, v)], torch.empty_like(log_sums)
        parts, sink_gradient = None, None
        if sinks is not None:
            parts = torch.empty(backward.num_sink_parts(problem), len(sinks), device=q.device)
            sink_gradient = torch.empty_like(sinks)
        backward.launch_deltas(launch, problem, out, gradient, log_sums, deltas, parts)
        if sinks is not None:
            launch_column_sums(launch, parts, sink_gradient)
        saved = gradient, log_sums, deltas
        walk = ctx.mask.walk(backward.QUERY_SIZES, problem)
        backward.launch_query_gradient(launch, problem, walk, saved, gradients[0])
        walk = ctx.mask.walk(backward.KEY_SIZES, problem, of_keys=True)
        backward.launch_key_gradients(launch, problem, walk, saved, (gradients[1], gradients[2]))
        return *gradients, sink_gradient, None, None


def attention(
    dtype: torch.dtype,
    device: str,
    heads: Sequence[int],
    documents: Sequence[int],
    window: int | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
    has_slopes: bool = False,
) -> Case:
    """Return the case of one row of documents, for [query heads, key heads, channels]."""
    num_heads, kv_heads, head_dim = heads
    mask, scale, length = Mask(documents, window, device), head_dim**-0.5, sum(documents)
    q, k, v = (
        leaf(1, length, count, head_dim, dtype=dtype, device=device) for count in (num_heads, kv_heads, kv_heads)
    )
    sinks = [torch.randn(num_heads, device=device).requires_grad_()] if has_sinks else []
    slopes = 2.0 ** (-8.0 * torch.arange(1, num_heads + 1, device=device) / num_heads) if has_slopes else None
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "slopes": slopes}

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        return Attention.apply(q, k, v, sinks, mask, options)

    def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Compute one head at a time, and recompute it in the backward pass, to save memory for the scores."""
        group, seen = num_heads // kv_heads, mask.dense()
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32

        def head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slope: float, sink: torch.Tensor) -> torch.Tensor:
            scores = (q @ k.mT).to(wide) * scale
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            positions = torch.arange(length, device=device)
            scores = (scores - slope * (positions[:, None] - positions)).masked_fill(~seen, float("-inf"))
            largest = torch.logaddexp(scores.logsumexp(-1), sink)
            return (scores - largest[:, None]).exp().to(v.dtype) @ v

        outs = [
            checkpoint(
                *(head, q[0, :, n], k[0, :, n // group], v[0, :, n // group]),
                0.0 if slopes is None else float(slopes[n]),
                torch.tensor(float("-inf"), dtype=wide, device=device) if sinks is None else sinks[n].to(wide),
                use_reentrant=False,
            )
            for n in range(num_heads)
        ]
        return torch.stack(outs, dim=1)[None]

    operations = mask.num_pairs * num_heads * head_dim
    sdpa = (
        None if softcap or has_sinks or has_slopes else Peer("torch", lambda: _sdpa(mask, len(documents) == 1, window))
    )
    return Case(
        [q, k, v, *sinks],
        ours,
        formula,
        sdpa,
        operations=14 * operations,
        forward_operations=4 * operations,
        programs=("ours", "compiled", *(["peer"] if sdpa else [])),
        compilable=_flex(mask, options),
    )


def _sdpa(mask: Mask, is_single: bool, window: int | None) -> Op:
    """Return PyTorch's fused attention, which skips masked tiles only for a single document without a window."""
    is_causal = is_single and window is None
    dense = None if is_causal else mask.dense()

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.transpose(1, 2) for each in tensors)
        out = F.scaled_dot_product_attention(q, k, v, dense, is_causal=is_causal, enable_gqa=True)
        return out.transpose(1, 2)

    return run


def _flex(mask: Mask, options: dict[str, Any]) -> Op:
    """Return PyTorch's flex_attention; a sink divides the result by 1 + exp(sink - log-sum-exp)."""
    rows, softcap, slopes, length = mask.start_rows[0], options["softcap"], options["slopes"], mask.rows.shape[1]

    def is_visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j <= i) & (i < rows[j])

    def score(x: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        x = x if softcap is None else softcap * torch.tanh(x / softcap)
        return x if slopes is None else x - slopes[h] * (i - j)

    blocks = create_block_mask(is_visible, None, None, length, length, rows.device) if rows.is_cuda else None
    score_mod = None if softcap is None and slopes is None else score

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *sinks: torch.Tensor) -> torch.Tensor:
        out, log_sums = flex_attention(
            *(each.transpose(1, 2) for each in (q, k, v)),
            score_mod=score_mod,
            block_mask=blocks,
            scale=options["scale"],
            enable_gqa=True,
            return_lse=True,
        )
        if sinks:
            out = out * torch.sigmoid(log_sums - sinks[0][:, None]).unsqueeze(-1).to(out.dtype)
        return out.transpose(1, 2)

    return run


HALF = (torch.float16, BF16)
"""Dtypes of the checks: float32 is computed in TF32 on a GPU."""
LONG, PACKED = (8192,), (1800, 350, 2600, 90, 1200, 700, 1000, 452)
GEMMA2, GPT_OSS, LLAMA = (16, 8, 256), (64, 8, 64), (32, 8, 128)
OPS = {
    "attention": Entry(
        attention,
        {"8b": (BF16, LLAMA, LONG), "8b_packed": (BF16, LLAMA, PACKED), "8b_window": (BF16, LLAMA, LONG, 1024)},
        [((4, 2, 20), (9, 26)), ((2, 1, 16), (35,), 6)],
        HALF,
    ),
    "attention_softcap": Entry(
        functools.partial(attention, softcap=50.0),
        {"gemma2_9b": (BF16, GEMMA2, LONG, 4096), "gemma2_9b_packed": (BF16, GEMMA2, PACKED, 4096)},
        [((4, 2, 20), (9, 26))],
        HALF,
    ),
    "attention_sinks": Entry(
        functools.partial(attention, has_sinks=True),
        {"gpt_oss_20b": (BF16, GPT_OSS, LONG), "gpt_oss_20b_window": (BF16, GPT_OSS, LONG, 128)},
        [((4, 2, 20), (9, 26))],
        HALF,
    ),
    "attention_alibi": Entry(
        functools.partial(attention, has_slopes=True),
        {"7b": (BF16, (32, 32, 128), LONG)},
        [((4, 2, 20), (9, 26))],
        HALF,
    ),
}
