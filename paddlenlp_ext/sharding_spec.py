"""The words in which a model family says how it is cut over devices.

A tensor plan maps a layer's name pattern to a style; only `parallel/tensor_parallel.py` knows which axis a style cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Style = Literal["colwise", "rowwise", "vocab", "replicated"]
"""colwise: outputs are cut; rowwise: inputs are cut; vocab: rows of an embedding or head are cut."""

TensorPlan = dict[str, Style]
"""`{"model.layers.*.self_attn.o_proj": "rowwise", ...}`; `*` stands for one part of a dotted name."""


@dataclass(frozen=True)
class Shard:
    """The part of a parameter that this process holds; it stands at the parameter itself, as `parameter.cut`.

    Attributes:
        axis: along which the whole is cut.
        start, stop: the indices held, of the whole's.
        size: of the whole along that axis.
    """

    axis: int
    start: int
    stop: int
    size: int

    def full_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """From the shape of the part to that of the whole."""
        return (*shape[: self.axis], self.size, *shape[self.axis + 1 :])

    @property
    def index(self) -> tuple[slice, ...]:
        """What picks the part out of the whole."""
        return (*(slice(None),) * self.axis, slice(self.start, self.stop))


def full_shape(parameter: Any) -> tuple[int, ...]:
    """The shape of the whole that this is, or is a part of."""
    cut = shard_of(parameter)
    return tuple(parameter.shape) if cut is None else cut.full_shape(parameter.shape)


def shard_of(parameter: Any) -> Shard | None:
    """Which part this is; None for a whole."""
    return getattr(parameter, "cut", None)


def is_materialized(tensor: Any) -> bool:
    """Whether its values stand in this process between two passes; else another process has them."""
    return is_on_stage(tensor) and not getattr(tensor, "is_gathered_copy", False)


def is_on_stage(tensor: Any) -> bool:
    """Whether it belongs to this stage of a pipeline; of what belongs to others a process knows the shape alone."""
    return not getattr(tensor, "is_elsewhere", False)


def is_updated_here(parameter: Any) -> bool:
    """Whether this process's optimizer updates it, and has its state; else another process sends the new values."""
    return not getattr(parameter, "is_updated_elsewhere", False)
