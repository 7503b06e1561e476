"""Groups of tensors that one launch of an optimizer kernel updates, and the address tables of the groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import paddle

    from paddlenlp_ext.ops.stochastic_rounding import DrawPosition

_ALIGNMENT = 16
"""Size in bytes of a GPU's widest load."""


class TableRow(NamedTuple):
    """Row of the address table: addresses of weight, gradient and state, size, and position of the random draws.

    Unused fields are 0. The kernels read the fields in this order (kernels.py).
    """

    weight: int
    gradient: int
    moment1: int
    moment2: int
    master: int
    size: int
    key: int = 0
    step: int = 0
    first: int = 0
    width: int = 1
    stride: int = 1
    scales1: int = 0
    scales2: int = 0

    def with_draws(self, position: DrawPosition) -> TableRow:
        """Return the row with the position of its random draws; the key combines seed and tensor index."""
        key = position.seed | position.tensor << 32
        key -= (key >> 63) << 64  # as a signed integer with the same bits
        return self._replace(
            key=key, step=position.step, first=position.first, width=position.width, stride=position.stride
        )

    @property
    def alignment(self) -> int:
        """Return 16 if the size and all addresses except the scales are divisible by 16, otherwise 1."""
        return 1 if any(number % _ALIGNMENT for number in self[:6]) else _ALIGNMENT

    @property
    def has_groups(self) -> bool:
        """Return whether each group of 8 consecutive values shares one counter of the random draws."""
        is_one_line = self.width >= self.size
        return self.first % 8 == 0 and (is_one_line or (self.width % 8 == 0 and self.stride % 8 == 0))


class TensorUpdate(NamedTuple):
    """Table row and hyperparameters of one tensor, with references that keep weight and gradient alive."""

    weight: paddle.Tensor
    gradient: paddle.Tensor
    row: TableRow
    numbers: tuple[float, ...]
    rounding: str


def group_for_launches(updates: Sequence[TensorUpdate]) -> Iterable[tuple[list[TensorUpdate], dict[str, Any]]]:
    """Group non-empty updates by dtype, rounding and alignment; yield each group and its constants."""
    groups: dict[tuple[str, str, str, int], list[TensorUpdate]] = {}
    for update in updates:
        if update.row.size:
            weight, gradient = (each.dtype.name.lower() for each in (update.weight, update.gradient))
            groups.setdefault((weight, gradient, update.rounding, update.row.alignment), []).append(update)
    for key, group in groups.items():
        yield group, dict(zip(("WEIGHT", "GRADIENT", "ROUNDING", "ALIGNMENT"), key, strict=True))


def table_of(rows: Sequence[TableRow]) -> np.ndarray:
    """Return the address table with one row per tensor, int64 [N, 13]."""
    return np.array(rows, np.int64)


def block_map(sizes: Sequence[int], span: int) -> np.ndarray:
    """Return the tensor index and the span index of each program, int32 [M, 2]; a program updates `span` values."""
    parts = -(-np.array(sizes, np.int64) // span)
    tensor = np.repeat(np.arange(len(parts)), parts)
    part = np.arange(len(tensor)) - np.repeat(np.cumsum(parts) - parts, parts)
    return np.stack([tensor, part], axis=1).astype(np.int32)
