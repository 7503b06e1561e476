"""Sharding specification: styles of a tensor-parallel plan, and the placement of each tensor over processes.

A plan maps layer name patterns to styles. Only `parallel/shard_parameters.py` knows which axis a style shards.

Any module may read `placement_of(tensor)`; only `parallel/` changes it, through `set_placement`. By default a tensor is
full, and this process holds and updates it: `Placement()`, as in every single-process run.
This module does not import Paddle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Style = Literal["colwise", "inner_colwise", "rowwise", "vocab", "norm", "replicated", "experts"]
"""colwise: outputs are sharded; inner_colwise: like colwise, for a layer whose input comes from replicated layers;
rowwise: inputs are sharded; vocab: rows of the embedding or lm_head are sharded; norm: normalized features are sharded;
replicated: not sharded, but the output is used only by local heads or experts, so gradients must be summed; experts:
each rank holds some of the experts of a layer."""

TensorPlan = dict[str, Style]
"""`{"model.layers.*.self_attn.o_proj": "rowwise", ...}`; `*` matches one component of a dotted name."""


@dataclass(frozen=True)
class Shard:
    """Contiguous slice of a full tensor along one axis.

    Attributes:
        axis: the sharded axis.
        start, stop: range of indices of the full tensor that the slice covers.
        size: length of the full tensor along `axis`.
        by_experts: whether experts are sliced, over the expert-parallel ranks (and over tensor-parallel ranks, if there
            are several); otherwise the tensor is sliced over the tensor-parallel ranks.
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
    """Placement of one tensor over the processes of a run; the defaults describe a single-process run.

    Attributes:
        shard: slice that this tensor-parallel or expert-parallel rank holds; None for a full tensor.
        stages: pipeline stages that hold the tensor, in ascending order; empty without a pipeline.
        is_on_stage: False if this process's pipeline stage does not hold the tensor's values, only its shape.
        owner: sharding rank that updates the parameter (ZeRO); None if it is not assigned.
        is_updated_here: False if another sharding rank updates the parameter and broadcasts its new value.
        is_gathered_copy: True if another rank owns the value and this rank holds it only while gathered (ZeRO stage 3).
        needs_tp_reduce: True for a full parameter whose gradient must be summed over the tensor-parallel ranks, because
            each rank computes only a partial sum.
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
    """Return the placement of a tensor; without one, the default placement of a single-process run."""
    return getattr(tensor, "placement", _DEFAULT)


def set_placement(tensor: Any, **changes: Any) -> None:
    """Change some fields of the placement of a tensor.

    Raises:
        TypeError: `changes` names a field that `Placement` does not have.
    """
    tensor.placement = dataclasses.replace(placement_of(tensor), **changes)


def shard_of(tensor: Any) -> Shard | None:
    """Return the shard that this process holds; None for a full tensor."""
    return placement_of(tensor).shard


def is_expert_parallel(tensor: Any) -> bool:
    """Return whether the tensor holds only the experts of this expert-parallel rank."""
    shard = shard_of(tensor)
    return shard is not None and shard.by_experts


def full_shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of the unsharded tensor."""
    shard = shard_of(tensor)
    return tuple(tensor.shape) if shard is None else shard.full_shape(tensor.shape)


def is_on_stage(tensor: Any) -> bool:
    """Return whether this pipeline stage holds the values of the tensor; for other stages it knows only the shape."""
    return placement_of(tensor).is_on_stage


def is_materialized(tensor: Any) -> bool:
    """Return whether this process holds the tensor's values between two forward/backward passes."""
    placement = placement_of(tensor)
    return placement.is_on_stage and not placement.is_gathered_copy


def is_updated_here(parameter: Any) -> bool:
    """Return whether this process's optimizer updates the parameter and holds its state."""
    return placement_of(parameter).is_updated_here
