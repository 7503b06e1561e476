"""AdamW with decoupled weight decay (arXiv:1711.05101) that updates all parameters of a dtype in one call."""

from __future__ import annotations

from collections.abc import Iterable

import paddle

from paddlenlp_ext import paddle_compat
from paddlenlp_ext.ops.adamw import AdamWUpdate, adamw_bf16_op, adamw_op
from paddlenlp_ext.ops.adamw.updates import Bf16Update
from paddlenlp_ext.trainer.optimizers.bf16_rounding import StochasticRounding


class FusedAdamW(paddle.optimizer.AdamW):
    """AdamW with parameter groups; one call updates all parameters (ops/adamw).

    Results equal the results of `paddle.optimizer.AdamW` up to rounding, and the state tensors have the same names.
    A run can therefore resume from checkpoints of `paddle.optimizer.AdamW`, and vice versa.

    Attributes:
        rounding: stochastic rounding of bfloat16 parameters; None: bfloat16 parameters have fp32 copies.
    """

    rounding: StochasticRounding | None = None

    @paddle.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient; other parameters and their state do not change."""
        updates = [update for group in paddle_compat.parameter_groups(self) for update in self._updates(group)]
        constants = paddle_compat.adam_constants(self)
        single = [update for update in updates if update.parameter.dtype == paddle.float32]
        if single:
            adamw_op.choose(single[0].parameter)(single, *constants)
        half = [self._half_update(update) for update in updates if update.parameter.dtype != paddle.float32]
        if half:
            adamw_bf16_op.choose(half[0].update.parameter)(half, *constants)

    def _updates(self, group: dict) -> Iterable[AdamWUpdate]:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        paddle_compat.create_accumulators(self, parameters)
        state, masters = paddle_compat.accumulators(self), paddle_compat.master_weights(self)
        kinds = paddle_compat.adam_state_kinds(self)
        rate, decay = self.get_lr(), group["weight_decay"]
        for parameter in parameters:
            scale = parameter.optimize_attr["learning_rate"]
            key = masters.get(parameter.name, parameter).name
            moment1, moment2, beta1_power, beta2_power = (state[kind][key] for kind in kinds)
            yield AdamWUpdate(
                parameter, parameter.grad, moment1, moment2, beta1_power, beta2_power, rate * scale, decay
            )

    def _half_update(self, update: AdamWUpdate) -> Bf16Update:
        if self.rounding is not None:
            return Bf16Update(update, position=self.rounding.position(update.parameter))
        return Bf16Update(update, master=paddle_compat.master_weights(self)[update.parameter.name])
