"""Collectives that gradients pass: each is the other's transpose.

Every rank of the group calls them in the same order, forwards and backwards.
"""

from __future__ import annotations

from typing import Any

import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer


def spread(x: paddle.Tensor, group: Any) -> paddle.Tensor:
    """`x` itself, the same on all ranks; its gradient is the sum of theirs."""
    return _Spread.apply(x, group)


def summed(x: paddle.Tensor, group: Any) -> paddle.Tensor:
    """The sum of all ranks' `x`; its gradient, the same on all ranks, is each one's."""
    return _Summed.apply(x, group)


@paddle.no_grad()
def gathered(part: paddle.Tensor, axis: int, sizes: list[int], group: Any) -> paddle.Tensor:
    """The whole of which every rank holds `part`, so many indices of `axis` each. No gradient passes."""
    largest = max(sizes)
    missing = largest - part.shape[axis]
    if missing:  # gloo and NCCL gather equal parts
        shape = [*part.shape[:axis], missing, *part.shape[axis + 1 :]]
        part = paddle.concat([part, paddle.zeros(shape, part.dtype)], axis)
    if not part.size:  # of a layer that AdaLoRA left no rank; gloo divides by what there is to gather
        return paddle.zeros([*part.shape[:axis], sum(sizes), *part.shape[axis + 1 :]], part.dtype)
    parts: list[paddle.Tensor] = []
    dist.all_gather(parts, part.contiguous(), group=group)
    return paddle.concat([p.slice([axis], [0], [size]) for p, size in zip(parts, sizes, strict=True)], axis)


class _Spread(PyLayer):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()  # others may hold it too
        dist.all_reduce(gradient, group=ctx.group)
        return gradient


class _Summed(PyLayer):
    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone()
