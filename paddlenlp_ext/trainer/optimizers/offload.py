"""Optimizer state in the host's memory: it is on the GPU only while a step is made, when no activation is.

Not run on the machine it was written on, which has no GPU: tests/trainer/test_offload.py holds when what is moved
where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import paddle

from paddlenlp_ext.paddle_compat import share_storage

Move = Callable[[paddle.Tensor], None]


class OffloadedOptimizer:
    """Any optimizer, with its state in pinned host memory between steps.

    Attributes:
        inner: the optimizer itself.
    """

    def __init__(
        self,
        inner: Any,
        state: Callable[[], Iterable[paddle.Tensor]],
        to_device: Move | None = None,
        to_host: Move | None = None,
    ) -> None:
        """Wrap an optimizer.

        Args:
            inner: the optimizer.
            state: gives its live tensors, and makes them where no step was yet.
            to_device: moves a tensor to the GPU, in place.
            to_host: moves it to pinned memory, in place.
        """
        self.inner = inner
        self._state, self._to_device, self._to_host = state, to_device or _to_device, to_host or _to_pinned_memory

    def set_lr(self, learning_rate: float) -> None:
        """The rate of the steps that follow."""
        self.inner.set_lr(learning_rate)

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Set the gradients to zero, or drop them."""
        self.inner.clear_grad(set_to_zero)

    def step(self) -> None:
        """Fetch the state, make the step, put the state back."""
        # Small counters that lie on the CPU by themselves stay there.
        moving = [tensor for tensor in self._state() if not tensor.place.is_cpu_place()]
        for tensor in moving:
            self._to_device(tensor)
        self.inner.step()
        for tensor in moving:
            self._to_host(tensor)


def require_gpu(parameters: Iterable[paddle.Tensor]) -> None:
    """Raise a `ValueError` where a parameter is on the CPU: its optimizer state is in the host's memory anyway."""
    for parameter in parameters:
        if not parameter.place.is_gpu_place():
            raise ValueError(
                f"offload_optim keeps optimizer state off the GPU, and the model is on {parameter.place}: its state is "
                "in the host's memory anyway. Leave offload_optim out."
            )


def _to_device(tensor: paddle.Tensor) -> None:
    if tensor.place.is_cuda_pinned_place():
        share_storage(tensor.cuda(), tensor)


def _to_pinned_memory(tensor: paddle.Tensor) -> None:
    share_storage(tensor.pin_memory(), tensor)
