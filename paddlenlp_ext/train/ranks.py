"""What the trainer asks of the other processes of a run. One process asks nobody; `parallel` brings the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import paddle


class Ranks(Protocol):
    """The data-parallel group this process belongs to."""

    index: int
    size: int

    def sum_numbers(self, values: list[float]) -> list[float]:
        """Each value summed over the ranks."""

    def sum_gradients(self, parameters: Iterable[paddle.Tensor]) -> None:
        """Each parameter's gradient summed over the ranks, in place.

        A rank without a micro-batch in this window has no gradients; it counts as zeros.
        """


class SingleRank:
    """The group of one."""

    index = 0
    size = 1

    def sum_numbers(self, values: list[float]) -> list[float]:
        """The values themselves."""
        return values

    def sum_gradients(self, parameters: Iterable[paddle.Tensor]) -> None:
        """Nothing to add."""
