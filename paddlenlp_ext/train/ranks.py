"""What the trainer asks of the other processes of a run. One process asks nobody; `parallel` brings the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import paddle

from paddlenlp_ext.train.optim import global_norm


class Ranks(Protocol):
    """The processes of the run.

    Attributes:
        index, size: this process's place among those that have micro-batches of their own. Processes that share a
            replica of the model have the same index.
        is_main: whether this process writes files and tells of the run.
    """

    index: int
    size: int
    is_main: bool

    def sum_numbers(self, values: list[float]) -> list[float]:
        """Each value summed over the ranks."""

    def sum_gradients(self, parameters: Iterable[paddle.Tensor]) -> None:
        """Each parameter's gradient summed over the ranks, in place.

        A rank without a micro-batch in this window has no gradients; it counts as zeros. One that no rank has stays
        absent.
        """

    def norm(self, parameters: Iterable[paddle.Tensor]) -> float:
        """Euclidean norm of the parameters' gradients as one vector, whatever part of it this process holds."""

    def collect(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order."""

    def largest(self, value: float) -> float:
        """The largest value of all processes: what one of them has seen, all know."""

    def wait(self) -> None:
        """Until every process has come here."""


class SingleRank:
    """The group of one."""

    index = 0
    size = 1
    is_main = True

    def sum_numbers(self, values: list[float]) -> list[float]:
        """The values themselves."""
        return values

    def sum_gradients(self, parameters: Iterable[paddle.Tensor]) -> None:
        """Nothing to add."""

    def norm(self, parameters: Iterable[paddle.Tensor]) -> float:
        """Of the gradients that there are."""
        return global_norm(parameter.grad for parameter in parameters if parameter.grad is not None)

    def collect(self, value: Any) -> list[Any]:
        """The one value."""
        return [value]

    def largest(self, value: float) -> float:
        """The value itself."""
        return value

    def wait(self) -> None:
        """Nobody to wait for."""
