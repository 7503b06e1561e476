"""Cases of benchmarks/triton_ops.py: convolutions and recurrences of packed documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.triton_cases import BF16, F32, Case, Entry, Op, Peer, leaf, num_bytes
from benchmarks.triton_torch import launch, load
from paddlenlp_ext.ops.triton_utils.column_sums import launch_column_sums

CONVOLUTION, READERS = (load(f"causal_convolution/{name}.py") for name in ("kernels", "readers"))
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


OPS = {
    "causal_convolution": Entry(
        causal_convolution,
        {"qwen3.5_4b": (BF16, 8192, 4, PACKED), "lfm2_1.2b": (BF16, 2048, 3, PACKED)},
        [(37, 4, (9, 1, 26)), (130, 3, (35,))],
        (F32, torch.float16, BF16),
    ),
}
