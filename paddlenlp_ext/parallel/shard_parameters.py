"""Shard one parameter or buffer over tensor or expert ranks; the only file that knows which axis a style shards."""

from __future__ import annotations

import paddle
from paddle import nn

from paddlenlp_ext.paddle_compat import free_storage, has_storage, own_buffers, own_parameters
from paddlenlp_ext.parallel.mesh import ProcessAxis
from paddlenlp_ext.sharding_spec import Shard, Style, is_on_stage, set_placement, shard_of

AXES: dict[Style, int] = {"colwise": 0, "inner_colwise": 0, "rowwise": 1, "vocab": 0}  # of a weight [out, in]


def own_tensors(layer: nn.Layer) -> dict[str, paddle.Tensor]:
    """Return a layer's own parameters and buffers, without those of its sublayers."""
    tensors = {**own_parameters(layer), **own_buffers(layer)}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def set_own_tensor(layer: nn.Layer, name: str, tensor: paddle.Tensor) -> None:
    """Replace one of the tensors that `own_tensors` returns."""
    (own_parameters if name in own_parameters(layer) else own_buffers)(layer)[name] = tensor


@paddle.no_grad()
def shard_parameter(layer: nn.Layer, name: str, shard_axis: int, axis: ProcessAxis, even: bool = True) -> Shard:
    """Replace a layer's parameter or buffer by this rank's shard.

    Args:
        layer: the layer that owns the tensor.
        name: the tensor's name in the layer.
        shard_axis: the tensor's axis to shard.
        axis: the tensor-parallel ranks.
        even: whether to require shards of equal length.

    Raises:
        ValueError: `even` is set, and the number of ranks does not divide the axis.
    """
    full = own_tensors(layer)[name]
    size = full.shape[shard_axis]
    if even and size % axis.size:
        raise ValueError(
            f"tensor_parallel_degree {axis.size} does not divide {name} {list(full.shape)} of {type(layer).__name__} "
            f"along its axis {shard_axis}; choose a degree or an adapter size that divides {size}"
        )
    shard = local_shard(size, shard_axis, axis)
    _keep_slice(layer, name, shard, shard)
    return shard


def shard_experts(layer: nn.Layer, name: str, axis: ProcessAxis) -> Shard:
    """Replace a stacked tensor of experts, or of a tensor-parallel rank's experts, by this expert rank's slice.

    Args:
        layer: the layer that owns the tensor.
        name: the tensor's name in the layer; its first axis is that of the experts.
        axis: the expert-parallel ranks; their number divides the experts.
    """
    held = own_tensors(layer)[name]
    number = held.shape[0]
    kept, outer = local_shard(number, 0, axis), shard_of(held) or Shard(0, 0, number, number)
    shard = Shard(0, outer.start + kept.start, outer.start + kept.stop, outer.size, by_experts=True)
    _keep_slice(layer, name, kept, shard)
    return shard


def _keep_slice(layer: nn.Layer, name: str, kept: Shard, shard: Shard) -> None:
    """Replace a parameter or buffer by its slice `kept`, which is the slice `shard` of the unsharded tensor."""
    full = own_tensors(layer)[name]
    if not has_storage(full):  # built without values; the shard's values are loaded later
        shape = [*full.shape[: kept.axis], kept.stop - kept.start, *full.shape[kept.axis + 1 :]]
        part = paddle.zeros(shape, full.dtype)
    else:
        part = full[kept.index].clone()
    if name not in own_parameters(layer):
        part.stop_gradient = True
    else:
        new = layer.create_parameter(
            list(part.shape), dtype=full.dtype, default_initializer=nn.initializer.Constant(0.0)
        )
        new.set_value(part)
        new.stop_gradient = full.stop_gradient
        new.is_distributed = True
        part = new
    set_own_tensor(layer, name, part)
    set_placement(part, shard=shard, is_on_stage=is_on_stage(full))
    if not is_on_stage(full):
        free_storage(part)


def local_shard(size: int, shard_axis: int, axis: ProcessAxis) -> Shard:
    """Return the slice of `size` indices that this rank holds."""
    sizes = shard_sizes(size, axis.size)
    start = sum(sizes[: axis.index])
    return Shard(shard_axis, start, start + sizes[axis.index], size)


def shard_sizes(size: int, parts: int) -> list[int]:
    """Return the lengths of the shards of `size` indices; the first ones may be longer by one."""
    return [size // parts + (index < size % parts) for index in range(parts)]


def keep_on_first_rank(layer: nn.Layer, name: str, axis: ProcessAxis) -> None:
    """Remove a parameter from all ranks except the first: after an all-reduce it must be added once."""
    if axis.index == 0:
        getattr(layer, name).is_distributed = True  # the gradient norm counts the parameter once, like a shard
    else:
        setattr(layer, name, None)
