"""Differentiable collectives of tensor and expert parallelism, and bucketed all-reduce of gradients.

`copy_to_group` and `reduce_from_group` are Megatron's conjugate pair f and g (arXiv:1909.08053):

    function             forward       backward
    copy_to_group        identity      all-reduce
    reduce_from_group    all-reduce    identity

`exchange_rows` is an all-to-all of rows. The backward pass of `exchange_rows` sends the gradients of the rows in the
opposite direction.

All ranks of a group must call these functions in the same order, in the forward pass and in the backward pass.
Gradients and parameter values are sent in buckets of at most 64 MiB.
"""

from __future__ import annotations

from typing import Any

import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer

from paddlenlp_ext.devices import place_of
from paddlenlp_ext.sharding_spec import placement_of

BUCKET_BYTES = 64 << 20
"""Maximum size of a bucket in bytes. The tensors of a bucket are concatenated and sent in one collective."""


def buckets(tensors: list[paddle.Tensor]) -> list[list[paddle.Tensor]]:
    """Group consecutive tensors of equal dtype into buckets of at most 64 MiB; a larger tensor gets its own bucket."""
    result: list[list[paddle.Tensor]] = []
    filled = 0
    for tensor in tensors:
        num_bytes = tensor.size * tensor.element_size()
        if not result or result[-1][0].dtype != tensor.dtype or filled + num_bytes > BUCKET_BYTES:
            result.append([])
            filled = 0
        result[-1].append(tensor)
        filled += num_bytes
    return result


@paddle.no_grad()
def fill_missing_gradients(parameters: list[paddle.Tensor], group: Any) -> list[paddle.Tensor]:
    """Return the parameters that have a gradient on at least one rank, and call `complete_gradient` for them."""
    has_gradient = paddle.to_tensor([float(parameter.grad is not None) for parameter in parameters])
    dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX, group=group)
    present = [parameter for parameter, flag in zip(parameters, has_gradient.numpy(), strict=True) if flag]
    for parameter in present:
        complete_gradient(parameter)
    return present


def complete_gradient(parameter: paddle.Tensor) -> None:
    """Set a missing gradient to 0, and move a gradient to the device of this process.

    Paddle leaves a gradient on the CPU if the device has no kernel that computes it.
    """
    gradient, place = parameter.grad, place_of(paddle.get_device())
    if gradient is None:
        parameter.grad = zero_gradient(parameter)
    elif gradient.place != place:
        moved = gradient.to(place)
        parameter.grad = None  # Paddle does not replace a gradient by a gradient on another device
        parameter.grad = moved


def zero_gradient(parameter: paddle.Tensor) -> paddle.Tensor:
    """Return a gradient of zeros, float32 if the `Placement` of the parameter requires float32 gradients."""
    has_float32 = placement_of(parameter).has_float32_gradient
    return paddle.zeros(parameter.shape, "float32" if has_float32 else parameter.dtype)


@paddle.no_grad()
def sum_gradients(parameters: list[paddle.Tensor], group: Any) -> None:
    """All-reduce gradients over `group` in place; a gradient that is None on all ranks stays None."""
    if not parameters:
        return
    present = fill_missing_gradients(parameters, group)
    for bucket in buckets([parameter.grad for parameter in present if parameter.grad is not None]):
        if len(bucket) == 1:
            dist.all_reduce(bucket[0], group=group)
            continue
        flat = paddle.concat([gradient.reshape([-1]) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        for gradient, total in zip(bucket, flat.split([gradient.size for gradient in bucket]), strict=True):
            gradient.set_value(total.reshape(gradient.shape))


def copy_to_group(x: paddle.Tensor, group: Any) -> paddle.Tensor:
    """Return `x`, which must be equal on all ranks; the backward pass all-reduces the gradient of `x`."""
    return _CopyToGroup.apply(x, group)


def reduce_from_group(x: paddle.Tensor, group: Any) -> paddle.Tensor:
    """Return the sum of `x` over the ranks; the backward pass leaves the gradient unchanged."""
    return _ReduceFromGroup.apply(x, group)


def exchange_rows(x_ND: paddle.Tensor, sent: list[int], received: list[int], group: Any) -> paddle.Tensor:
    """Send rows to all ranks of a group and return the received rows, in the order of the ranks; differentiable.

    Args:
        x_ND: rows, sorted by destination rank.
        sent: number of rows to send to each rank.
        received: number of rows to receive from each rank.
        group: communication group of the ranks.
    """
    return _ExchangeRows.apply(x_ND, sent, received, group)


@paddle.no_grad()
def all_to_all_rows(x: paddle.Tensor, sent: list[int] | None, received: list[int] | None, group: Any) -> paddle.Tensor:
    """Send rows to all ranks of a group and return the received rows, in the order of the ranks; not differentiable.

    Args:
        x: rows, sorted by destination rank.
        sent: number of rows to send to each rank; None: exchange the same number of rows with every rank.
        received: number of rows to receive from each rank; None if `sent` is None.
        group: communication group of the ranks.
    """
    result = paddle.empty([x.shape[0] if received is None else sum(received), *x.shape[1:]], x.dtype)
    dist.alltoall_single(
        out_tensor=result, in_tensor=x.contiguous(), out_split_sizes=received, in_split_sizes=sent, group=group
    )
    return result


@paddle.no_grad()
def all_gather_cat(part: paddle.Tensor, axis: int, sizes: list[int], group: Any) -> paddle.Tensor:
    """Gather shards of different lengths and concatenate them; not differentiable.

    Args:
        part: shard of this rank.
        axis: the sharded axis.
        sizes: length of the shard of each rank along `axis`.
        group: communication group of the ranks.
    """
    largest = max(sizes)
    missing = largest - part.shape[axis]
    if missing:  # gloo and NCCL gather only tensors of equal shape
        shape = [*part.shape[:axis], missing, *part.shape[axis + 1 :]]
        part = paddle.concat([part, paddle.zeros(shape, part.dtype)], axis)
    if not part.size:  # a layer that AdaLoRA pruned to rank 0; gloo would divide by zero for an empty tensor
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
        gradient = gradient.clone()  # copied, because other operations may read the gradient
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


class _ExchangeRows(PyLayer):
    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return all_to_all_rows(x, sent, received, group)

    @staticmethod
    def backward(ctx, gradient):
        return all_to_all_rows(gradient, ctx.received, ctx.sent, ctx.group)
