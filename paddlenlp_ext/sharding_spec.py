"""Sharding specification: styles of a tensor-parallel plan, and the placement of each tensor on processes.

A plan maps layer name patterns to styles. `parallel/shard_parameters.py` defines which axis a style shards.

For a tensor without a placement, this process holds and updates the full tensor. This module does not import Paddle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Style = Literal["colwise", "inner_colwise", "rowwise", "vocab", "norm", "replicated", "experts"]
"""Sharding style of a layer.

colwise: outputs are sharded.
inner_colwise: outputs are sharded, and the input is the output of replicated layers.
rowwise: inputs are sharded.
vocab: rows of the embedding or lm_head are sharded.
norm: normalized features are sharded.
replicated: weights are not sharded. Each rank uses the output only for its own heads or experts, so gradients must be
    summed over the ranks.
experts: each rank holds some of the experts of a layer.
"""

TensorPlan = dict[str, Style]
"""Layer name pattern -> style, such as `{"model.layers.*.self_attn.o_proj": "rowwise"}`.

`*` matches one component of a dotted name.
"""


@dataclass(frozen=True)
class Shard:
    """Contiguous slice of a full tensor along one axis.

    Attributes:
        axis: the sharded axis.
        start: first index of the slice in the full tensor.
        stop: last index of the slice in the full tensor, plus 1.
        size: length of the full tensor along `axis`.
        by_experts: whether the slice is a range of experts, sharded over expert-parallel and tensor-parallel ranks;
            False: the tensor is sharded over tensor-parallel ranks only.
    """

    axis: int
    start: int
    stop: int
    size: int
    by_experts: bool = False

    def full_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the full tensor, given the shape of the shard."""
        return (*shape[: self.axis], self.size, *shape[self.axis + 1 :])

    @property
    def index(self) -> tuple[slice, ...]:
        """Index that selects the shard from the full tensor."""
        return (*(slice(None),) * self.axis, slice(self.start, self.stop))


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of one tensor on the processes of a run; the defaults describe a single-process run.

    Attributes:
        shard: slice that this tensor-parallel or expert-parallel rank holds; None for a full tensor.
        stages: pipeline stages that hold the tensor, in ascending order; empty without a pipeline.
        is_on_stage: False if the pipeline stage of this process holds only the shape of the tensor.
        owner: sharding rank that ZeRO assigned to update the parameter; None if no rank was assigned.
        is_updated_here: False if another sharding rank updates and broadcasts the parameter.
        is_gathered_copy: True if another rank owns the parameter, and this rank holds its values only while a layer
            needs them (ZeRO stage 3).
        needs_tp_reduce: True for a full parameter whose gradient must be summed over the tensor-parallel ranks, because
            each rank computes a partial sum.
        has_float32_gradient: True for a parameter in half precision whose gradient is float32 (`amp_master_grad`).
    """

    shard: Shard | None = None
    stages: tuple[int, ...] = ()
    is_on_stage: bool = True
    owner: int | None = None
    is_updated_here: bool = True
    is_gathered_copy: bool = False
    needs_tp_reduce: bool = False
    has_float32_gradient: bool = False


_DEFAULT = Placement()


def placement_of(tensor: Any) -> Placement:
    """Return the placement of a tensor; the default is the placement in a single-process run."""
    return getattr(tensor, "placement", _DEFAULT)


def set_placement(tensor: Any, **changes: Any) -> None:
    """Change fields of the placement of a tensor.

    Raises:
        TypeError: `changes` names a field that `Placement` does not have.
    """
    tensor.placement = dataclasses.replace(placement_of(tensor), **changes)


def shard_of(tensor: Any) -> Shard | None:
    """Return the slice of a tensor that this process holds; None for a full tensor."""
    return placement_of(tensor).shard


def is_expert_parallel(tensor: Any) -> bool:
    """Return whether the tensor is a slice that holds some of a layer's experts."""
    shard = shard_of(tensor)
    return shard is not None and shard.by_experts


def full_shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of the unsharded tensor."""
    shard = shard_of(tensor)
    return tuple(tensor.shape) if shard is None else shard.full_shape(tensor.shape)


def is_on_stage(tensor: Any) -> bool:
    """Return whether the pipeline stage of this process holds the values of the tensor."""
    return placement_of(tensor).is_on_stage


def is_materialized(tensor: Any) -> bool:
    """Return whether this process holds the values of the tensor between two training steps."""
    placement = placement_of(tensor)
    return placement.is_on_stage and not placement.is_gathered_copy


def is_updated_here(parameter: Any) -> bool:
    """Return whether the optimizer of this process updates the parameter and holds its optimizer state."""
    return placement_of(parameter).is_updated_here


class ShardGroup(Protocol):
    """Tensor-parallel group of `size` ranks; `index` is the rank of this process."""

    @property
    def index(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Any) -> Any:
        """Return the sum of `x` over the ranks of the group; differentiable."""
        ...

    def copy(self, x: Any) -> Any:
        """Return `x`, a tensor that is equal on all ranks; the backward pass all-reduces the gradient of `x`."""
        ...

    def all_gather(self, part: Any, axis: int) -> Any:
        """Concatenate the equally shaped shards of all ranks along `axis`; not differentiable."""
        ...
