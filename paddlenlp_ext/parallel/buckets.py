"""Gradients and values travel some tens of megabytes at a time."""

from __future__ import annotations

from typing import Any

import paddle
import paddle.distributed as dist

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
def present_somewhere(parameters: list[paddle.Tensor], group: Any) -> list[paddle.Tensor]:
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
    for bucket in buckets([parameter.grad for parameter in present_somewhere(parameters, group)]):
        if len(bucket) == 1:
            dist.all_reduce(bucket[0], group=group)
            continue
        flat = paddle.concat([gradient.reshape([-1]) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        for gradient, summed in zip(bucket, flat.split([gradient.size for gradient in bucket]), strict=True):
            gradient.set_value(summed.reshape(gradient.shape))
