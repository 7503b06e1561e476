"""Base class of optimizers with small state: parameter groups, decoupled weight decay, fp32 copies, step count.

The methods `set_lr`, `step` and `clear_grad` have the interface of Paddle's optimizers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import paddle

from paddlenlp_ext.config.sections.optim import OptimConfig
from paddlenlp_ext.ops.adamw.updates import AdamStep
from paddlenlp_ext.ops.stochastic_rounding import stochastic_round
from paddlenlp_ext.trainer.optimizers.bf16_rounding import StochasticRounding


class ParameterUpdate(NamedTuple):
    """Inputs of the update of one parameter: gradient, state tensors, hyperparameters and weight decay."""

    parameter: paddle.Tensor
    gradient: paddle.Tensor
    state: dict[str, paddle.Tensor]
    step: AdamStep
    weight_decay: float


class SmallStateOptimizer(ABC):
    """Base class of AdamW variants; a subclass defines the moments of a parameter and its update.

    Weight decay is applied before the update (arXiv:1711.05101). A half-precision parameter either has an fp32 copy
    (`master_weight`), or is converted to fp32, updated and rounded stochastically. Parameters without a gradient, and
    their state, do not change.
    """

    def __init__(
        self, groups: list[dict[str, Any]], options: OptimConfig, rounding: StochasticRounding | None = None
    ) -> None:
        """Store parameter groups and options.

        Args:
            groups: the result of `parameter_groups`.
            options: `config.optim`.
            rounding: stochastic rounding of half-precision parameters; None: fp32 copies.
        """
        self._rounding = rounding
        self._members = [
            (parameter, group["learning_rate"], group["weight_decay"])
            for group in groups
            for parameter in group["params"]
        ]
        self._learning_rate = options.learning_rate
        self.beta1, self.beta2, self.epsilon = options.adam_beta1, options.adam_beta2, options.adam_epsilon
        self._states: dict[str, dict[str, paddle.Tensor]] = {}

    def set_lr(self, learning_rate: float) -> None:
        """Set the learning rate of the next steps."""
        self._learning_rate = learning_rate

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Set gradients to zero, or drop them if `set_to_zero` is False."""
        for parameter, _, _ in self._members:
            parameter.clear_gradient(set_to_zero)  # positional, because Paddle ignores the keyword argument

    @paddle.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for update in self._updates():
            self._update_one(update)

    def _updates(self) -> Iterator[ParameterUpdate]:
        """Increment the step count of each parameter that has a gradient, and yield the inputs of the update."""
        for parameter, rate_scale, weight_decay in self._members:
            gradient = parameter.grad
            if gradient is None:
                continue
            state, rate = self.state_of(parameter), self._learning_rate * rate_scale
            num_steps = int(state["step"].numpy()[0]) + 1
            state["step"] = _counter(num_steps)
            step = AdamStep(self.beta1, self.beta2, self.epsilon, num_steps, rate)
            yield ParameterUpdate(parameter, gradient, state, step, weight_decay)

    def _update_one(self, update: ParameterUpdate) -> None:
        """Update one parameter."""
        parameter, gradient, state, step, weight_decay = update
        is_half = parameter.dtype != paddle.float32
        value = parameter
        if is_half:
            value = state["master_weight"] if self._rounding is None else parameter.astype("float32")
        if weight_decay > 0.0:
            value.scale_(1.0 - step.rate * weight_decay)
        self._update_parameter(parameter.name, value, gradient.astype("float32"), state, step)
        if is_half and self._rounding is not None:
            parameter.set_value(stochastic_round(value, self._rounding.position(parameter)))
        elif is_half:
            parameter.set_value(value.astype(parameter.dtype))

    def state_of(self, parameter: paddle.Tensor) -> dict[str, paddle.Tensor]:
        """Return the state tensors of a parameter; create them at the first call."""
        if parameter.name not in self._states:
            state = {"step": _counter(0)}
            if parameter.dtype != paddle.float32 and self._rounding is None:
                state["master_weight"] = parameter.detach().astype("float32")
            self._states[parameter.name] = state | self._new_moments(parameter)
        return self._states[parameter.name]

    @abstractmethod
    def _new_moments(self, parameter: paddle.Tensor) -> dict[str, paddle.Tensor]:
        """Return the initial moments of a parameter by name."""

    @abstractmethod
    def _update_parameter(
        self, name: str, value: paddle.Tensor, gradient: paddle.Tensor, state: dict[str, paddle.Tensor], step: AdamStep
    ) -> None:
        """Update the moments and `value` in place; all tensors are fp32."""


def _counter(steps: int) -> paddle.Tensor:
    """Return a step count as a CPU tensor, so that reading the count does not wait for GPU kernels."""
    return paddle.to_tensor([steps], dtype="int64", place=paddle.CPUPlace())
