"""What the optimizers with small state share: parameters in groups, decoupled weight decay, fp32 copies, a step count.

Used as Paddle's optimizers are: `set_lr`, `step`, `clear_grad`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import paddle

from paddlenlp_ext.config.sections import OptimConfig
from paddlenlp_ext.ops.adamw_8bit import AdamStep


class SmallStateOptimizer(ABC):
    """A relative of AdamW; a subclass says what it keeps of a parameter and how it moves it.

    Weight decay acts before the update (Loshchilov and Hutter, 2019). A parameter of half precision is updated in an
    fp32 copy, `master_weight`. A parameter without a gradient is left alone, and so is its state.
    """

    def __init__(self, groups: list[dict[str, Any]], options: OptimConfig) -> None:
        """Take groups from `optim.parameter_groups`; `learning_rate` in them multiplies the rate."""
        self._members = [
            (parameter, group["learning_rate"], group["weight_decay"])
            for group in groups
            for parameter in group["params"]
        ]
        self._learning_rate = options.learning_rate
        self.beta1, self.beta2, self.epsilon = options.adam_beta1, options.adam_beta2, options.adam_epsilon
        self._states: dict[str, dict[str, paddle.Tensor]] = {}

    def set_lr(self, learning_rate: float) -> None:
        """The rate of the steps that follow."""
        self._learning_rate = learning_rate

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Set the gradients to zero, or drop them."""
        for parameter, _, _ in self._members:
            parameter.clear_gradient(set_to_zero)  # by position: Paddle ignores the keyword

    @paddle.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        for parameter, rate_scale, weight_decay in self._members:
            if parameter.grad is None:
                continue
            state, rate = self.state_of(parameter), self._learning_rate * rate_scale
            state["step"] = _counter(state["step"].item() + 1)
            value = state.get("master_weight", parameter)
            if weight_decay > 0.0:
                value.scale_(1.0 - rate * weight_decay)
            now = AdamStep(self.beta1, self.beta2, self.epsilon, state["step"].item(), rate)
            self._update_parameter(parameter.name, value, parameter.grad.astype("float32"), state, now)
            if value is not parameter:
                parameter.set_value(value.astype(parameter.dtype))

    def state_of(self, parameter: paddle.Tensor) -> dict[str, paddle.Tensor]:
        """The live tensors kept of a parameter, made where no step was yet."""
        if parameter.name not in self._states:
            state = {"step": _counter(0)}
            if parameter.dtype != paddle.float32:
                state["master_weight"] = parameter.detach().astype("float32")
            self._states[parameter.name] = state | self._new_moments(parameter)
        return self._states[parameter.name]

    @abstractmethod
    def _new_moments(self, parameter: paddle.Tensor) -> dict[str, paddle.Tensor]:
        """What is kept of the gradients of a parameter, before the first one."""

    @abstractmethod
    def _update_parameter(
        self, name: str, value: paddle.Tensor, gradient: paddle.Tensor, state: dict[str, paddle.Tensor], step: AdamStep
    ) -> None:
        """Update the moments and `value`, in place, all fp32."""


def _counter(steps: int) -> paddle.Tensor:
    """A number that checkpoints can hold; on the CPU, where reading it waits for no kernel."""
    return paddle.to_tensor([steps], dtype="int64", place=paddle.CPUPlace())
