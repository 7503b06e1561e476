"""Shard a parameter or buffer over tensor or expert ranks; `AXES` defines the sharded axis of each style."""

from __future__ import annotations

import paddle
from paddle import nn

from paddlenlp_ext.paddle_compat import free_storage, has_storage, own_buffers, own_parameters
from paddlenlp_ext.parallel.mesh import ProcessAxis
from paddlenlp_ext.sharding_spec import Shard, Style, is_on_stage, set_placement, shard_of

AXES: dict[Style, int] = {"colwise": 0, "inner_colwise": 0, "rowwise": 1, "vocab": 0}  # for a weight [out, in]


def own_tensors(layer: nn.Layer) -> dict[str, paddle.Tensor]:
    """Return the parameters and buffers of a layer, excluding the tensors of its sublayers."""
    tensors = {**own_parameters(layer), **own_buffers(layer)}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def set_own_tensor(layer: nn.Layer, name: str, tensor: paddle.Tensor) -> None:
    """Replace a tensor returned by `own_tensors`."""
    (own_parameters if name in own_parameters(layer) else own_buffers)(layer)[name] = tensor


@paddle.no_grad()
def shard_parameter(layer: nn.Layer, name: str, shard_axis: int, axis: ProcessAxis, even: bool = True) -> Shard:
    """Replace a parameter or buffer of a layer with this rank's shard.

    Args:
        layer: the layer that owns the tensor.
        name: name of the tensor in the layer.
        shard_axis: axis of the tensor to shard.
        axis: mesh axis of the tensor-parallel ranks.
        even: whether the shards must have equal length.

    Raises:
        ValueError: `even` is set, and the number of ranks does not divide the axis.
    """
    full = own_tensors(layer)[name]
    size = full.shape[shard_axis]
    if even and size % axis.size:
        raise ValueError(
            f"tensor_parallel_degree {axis.size} does not divide {name} {list(full.shape)} of {type(layer).__name__} "
            f"along its axis {shard_axis}; choose a degree that divides {size}; if an adapter "
            f"option such as a block size or factor determines {size}, changing this option also helps"
        )
    shard = local_shard(size, shard_axis, axis)
    _keep_slice(layer, name, shard, shard)
    return shard


def shard_experts(layer: nn.Layer, name: str, axis: ProcessAxis) -> Shard:
    """Replace a tensor that has one slice per expert with the slices of the experts that this rank holds.

    Args:
        layer: the layer that owns the tensor.
        name: name of the tensor in the layer; the first axis of the tensor is the expert.
        axis: mesh axis of the expert-parallel ranks; its size divides the number of experts.
    """
    held = own_tensors(layer)[name]
    number = held.shape[0]
    kept, outer = local_shard(number, 0, axis), shard_of(held) or Shard(0, 0, number, number)
    shard = Shard(0, outer.start + kept.start, outer.start + kept.stop, outer.size, by_experts=True)
    _keep_slice(layer, name, kept, shard)
    return shard


def _keep_slice(layer: nn.Layer, name: str, kept: Shard, shard: Shard) -> None:
    """Replace a parameter or buffer with a slice.

    Args:
        layer: the layer that owns the tensor.
        name: name of the tensor in the layer.
        kept: slice of the current tensor to keep.
        shard: position of the slice in the unsharded tensor, recorded in the `Placement`.
    """
    full = own_tensors(layer)[name]
    is_parameter = name in own_parameters(layer)
    shape = [*full.shape[: kept.axis], kept.stop - kept.start, *full.shape[kept.axis + 1 :]]
    if is_parameter and not has_storage(full):  # memory is allocated when the values are loaded
        with paddle.LazyGuard():
            part = _zeros_parameter(layer, shape, full)
    elif is_parameter:
        part = _zeros_parameter(layer, shape, full)
        part.set_value(full[kept.index])
    else:
        part = full[kept.index].clone() if has_storage(full) else paddle.zeros(shape, full.dtype)
        part.stop_gradient = True
    set_own_tensor(layer, name, part)
    set_placement(part, shard=shard, is_on_stage=is_on_stage(full))
    if has_storage(part) and not (is_on_stage(full) and has_storage(full)):
        free_storage(part)


def _zeros_parameter(layer: nn.Layer, shape: list[int], like: paddle.Tensor) -> paddle.Tensor:
    """Create a parameter of a sharded layer with the dtype and the gradient setting of the full parameter `like`."""
    parameter = layer.create_parameter(shape, dtype=like.dtype, default_initializer=nn.initializer.Constant(0.0))
    parameter.stop_gradient, parameter.is_distributed = like.stop_gradient, True
    return parameter


def local_shard(size: int, shard_axis: int, axis: ProcessAxis) -> Shard:
    """Return the shard of this rank along an axis of length `size`."""
    sizes = shard_sizes(size, axis.size)
    start = sum(sizes[: axis.index])
    return Shard(shard_axis, start, start + sizes[axis.index], size)


def shard_sizes(size: int, parts: int) -> list[int]:
    """Divide an axis of length `size` into `parts` shards; return the lengths. The first shards may be longer by 1."""
    return [size // parts + (index < size % parts) for index in range(parts)]


def keep_on_first_rank(layer: nn.Layer, name: str, axis: ProcessAxis) -> None:
    """Remove a bias from all ranks except the first, so that the all-reduce of the outputs adds the bias once."""
    if axis.index == 0:
        getattr(layer, name).is_distributed = True  # makes the gradient norm count the bias once
    else:
        setattr(layer, name, None)
