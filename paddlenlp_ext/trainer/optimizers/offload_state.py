"""Hold optimizer state in host memory, and move it to the GPU only for the optimizer step.

Offloading is experimental and untested on a GPU. tests/trainer/optimizers/test_offload_state.py checks only which
tensors are moved, and when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import paddle

from paddlenlp_ext.devices import capabilities
from paddlenlp_ext.paddle_compat import share_storage

Move = Callable[[paddle.Tensor], None]


class OffloadedOptimizer:
    """Optimizer wrapper that holds the state in pinned host memory between steps.

    Attributes:
        inner: the wrapped optimizer.
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
            inner: optimizer to wrap.
            state: function that returns the state tensors, and creates them before the first step.
            to_device: function that moves a tensor to the GPU in place.
            to_host: function that moves a tensor to pinned host memory in place.
        """
        self.inner = inner
        self._state, self._to_device, self._to_host = state, to_device or _to_device, to_host or _to_pinned_memory

    def set_lr(self, learning_rate: float) -> None:
        """Set the learning rate of the next steps."""
        self.inner.set_lr(learning_rate)

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Set gradients to zero, or drop them if `set_to_zero` is False."""
        self.inner.clear_grad(set_to_zero)

    def step(self) -> None:
        """Move the state to the GPU, run the optimizer step, and move the state back."""
        # Step counts stay on the CPU.
        moving = [tensor for tensor in self._state() if not tensor.place.is_cpu_place()]
        for tensor in moving:
            self._to_device(tensor)
        self.inner.step()
        for tensor in moving:
            self._to_host(tensor)


def require_gpu(parameters: Iterable[paddle.Tensor]) -> None:
    """Check that all parameters are on a GPU.

    Raises:
        ValueError: a parameter is not on a GPU.
    """
    for parameter in parameters:
        if not capabilities(parameter.place).pinned_memory:
            raise ValueError(
                "offload_optim (or offload in sharding) moves optimizer state from the GPU to host memory, but the "
                f"model is on {parameter.place}; remove the option"
            )


def _to_device(tensor: paddle.Tensor) -> None:
    if not capabilities(tensor.place).pinned_memory:  # the tensor is in host memory
        share_storage(tensor.to(paddle.get_device(), blocking=True), tensor)


def _to_pinned_memory(tensor: paddle.Tensor) -> None:
    share_storage(tensor.pin_memory(), tensor)
