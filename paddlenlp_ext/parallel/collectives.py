"""Collectives that gradients pass: each is the other's transpose.

Every rank of the group calls them in the same order, forwards and backwards.

Gradients and values travel some tens of megabytes at a time.
"""

from __future__ import annotations

from typing import Any

import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer

_BUCKET_BYTES = 64 << 20


def buckets(tensors: list[paddle.Tensor]) -> list[list[paddle.Tensor]]:
    """Neighbours of one format, up to a bucket's size together; a large one alone."""
    result: list[list[paddle.Tensor]] = []
    filled = 0
    for tensor in tensors:
        num_bytes = tensor.size * tensor.element_size()
        if not result or result[-1][0].dtype != tensor.dtype or filled + num_bytes > _BUCKET_BYTES:
            result.append([])
            filled = 0
        result[-1].append(tensor)
        filled += num_bytes
    return result


@paddle.no_grad()
def fill_missing_gradients(parameters: list[paddle.Tensor], group: Any) -> list[paddle.Tensor]:
    """Those of which a rank of the group has a gradient; zeros stand in on the ranks that have none."""
    wanted = paddle.to_tensor([float(parameter.grad is not None) for parameter in parameters])
    dist.all_reduce(wanted, op=dist.ReduceOp.MAX, group=group)
    present = [parameter for parameter, flag in zip(parameters, wanted.tolist(), strict=True) if flag]
    for parameter in present:
        if parameter.grad is None:
            parameter.grad = paddle.zeros_like(parameter)
    return present


@paddle.no_grad()
def sum_gradients(parameters: list[paddle.Tensor], group: Any) -> None:
    """Gradients of `parameters` summed over `group`, in place. One that no rank has stays absent."""
    if not parameters:
        return
    for bucket in buckets([parameter.grad for parameter in fill_missing_gradients(parameters, group)]):
        if len(bucket) == 1:
            dist.all_reduce(bucket[0], group=group)
            continue
        flat = paddle.concat([gradient.reshape([-1]) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        for gradient, total in zip(bucket, flat.split([gradient.size for gradient in bucket]), strict=True):
            gradient.set_value(total.reshape(gradient.shape))


def copy_to_group(x: paddle.Tensor, group: Any) -> paddle.Tensor:
    """`x` itself, the same on all ranks; its gradient is the sum of theirs."""
    return _CopyToGroup.apply(x, group)


def reduce_from_group(x: paddle.Tensor, group: Any) -> paddle.Tensor:
    """The sum of all ranks' `x`; its gradient, the same on all ranks, is each one's."""
    return _ReduceFromGroup.apply(x, group)


@paddle.no_grad()
def all_gather_cat(part: paddle.Tensor, axis: int, sizes: list[int], group: Any) -> paddle.Tensor:
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


class _CopyToGroup(PyLayer):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()  # others may hold it too
        dist.all_reduce(gradient, group=ctx.group)
        return gradient


class _ReduceFromGroup(PyLayer):
    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone()
