"""What the trainer asks of the other processes of a run. One process asks nobody; `parallel` brings the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import paddle

from paddlenlp_ext.trainer.optimizer import global_norm


class ProcessGroup(Protocol):
    """The processes of the run.

    Attributes:
        index, size: this process's place among those that have micro-batches of their own. Processes that share a
            replica of the model have the same index.
        is_main: whether this process writes files and tells of the run.
        moves_together: whether every forward pass needs all ranks; one without a micro-batch then repeats another's,
            which does not count.
    """

    index: int
    size: int
    is_main: bool
    forward_is_collective: bool

    def sum_numbers(self, values: list[float]) -> list[float]:
        """Each value summed over the ranks."""

    def sum_gradients(self, parameters: Iterable[paddle.Tensor]) -> None:
        """Each parameter's gradient summed over the ranks, in place.

        A rank without a micro-batch in this window has no gradients; it counts as zeros. One that no rank has stays
        absent.
        """

    def after_micro_batch(self) -> None:
        """After each micro-batch of the longest share: gradients may go to where they are kept."""

    def broadcast_updated(self) -> None:
        """After the optimizer's step: every process gets what others updated."""

    def gathered_parameters(self) -> AbstractContextManager[None]:
        """A block in which this process has the model's values without asking others; all enter and leave it."""

    def reduce_partial_grads(self, parameters: Iterable[paddle.Tensor]) -> None:
        """The same over processes that share a replica, for parameters of which each has seen only a part."""

    def save_gathered(self, tensors: Mapping[str, Any], write: Callable[[Mapping[str, Any]], None]) -> None:
        """Call `write` on the main process with every tensor whole, as Paddle tensors or as LazyTensors.

        All processes call it together, each with its own tensors, and leave it when the main one is done.
        """

    def sum_stages(self, values: list[float]) -> list[float]:
        """Each value summed over the stages of a pipeline, of which each knows a share; over replicas nothing."""

    def norm(self, parameters: Iterable[paddle.Tensor]) -> float:
        """Euclidean norm of the parameters' gradients as one vector, whatever part of it this process holds."""

    def collect(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order."""

    def largest(self, value: float) -> float:
        """The largest value of all processes: what one of them has seen, all know."""

    def union(self, names: set[str]) -> set[str]:
        """All processes' names together."""

    def wait(self) -> None:
        """Until every process has come here."""


class SingleProcess:
    """The group of one."""

    index = 0
    size = 1
    is_main = True
    forward_is_collective = False

    def sum_numbers(self, values: list[float]) -> list[float]:
        """The values themselves."""
        return values

    def sum_stages(self, values: list[float]) -> list[float]:
        """The values themselves."""
        return values

    def sum_gradients(self, parameters: Iterable[paddle.Tensor]) -> None:
        """Nothing to add."""

    def after_micro_batch(self) -> None:
        """They are kept here."""

    def broadcast_updated(self) -> None:
        """Nobody else updates."""

    def gathered_parameters(self) -> AbstractContextManager[None]:
        """It always has."""
        return nullcontext()

    def reduce_partial_grads(self, parameters: Iterable[paddle.Tensor]) -> None:
        """Every parameter is whole."""

    def save_gathered(self, tensors: Mapping[str, Any], write: Callable[[Mapping[str, Any]], None]) -> None:
        """Every tensor is."""
        write(tensors)

    def norm(self, parameters: Iterable[paddle.Tensor]) -> float:
        """Of the gradients that there are."""
        return global_norm(parameter.grad for parameter in parameters if parameter.grad is not None)

    def collect(self, value: Any) -> list[Any]:
        """The one value."""
        return [value]

    def largest(self, value: float) -> float:
        """The value itself."""
        return value

    def union(self, names: set[str]) -> set[str]:
        """These."""
        return names

    def wait(self) -> None:
        """Nobody to wait for."""
