"""AdamW for the CPU: Paddle's optimizer and its state, with all parameters updated in one call (ops/adamw.py)."""

from __future__ import annotations

from collections.abc import Iterable

import paddle

from paddlenlp_ext.ops.adamw import AdamWUpdate, adamw_op


class OneCallAdamW(paddle.optimizer.AdamW):
    """Paddle's AdamW, to rounding; its state has the same names, so that either goes on from the other's checkpoint.

    For parameters in fp32, given in groups, all of one device.
    """

    @paddle.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient, and no other's state."""
        updates = [update for group in self._param_groups for update in self._updates(group)]
        if updates:
            run = adamw_op.choose(updates[0].parameter)
            run(updates, self._beta1, self._beta2, self._epsilon)

    def _updates(self, group: dict) -> Iterable[AdamWUpdate]:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        self._create_accumulators(paddle.base.framework.default_main_program().global_block(), parameters)
        kinds = self._moment1_acc_str, self._moment2_acc_str, self._beta1_pow_acc_str, self._beta2_pow_acc_str
        tables = [self._accumulators[kind] for kind in kinds]
        rate, decay = self.get_lr(), group["weight_decay"]
        for parameter in parameters:
            state = [table[parameter.name] for table in tables]
            scale = parameter.optimize_attr["learning_rate"]
            yield AdamWUpdate(parameter, parameter.grad, *state, rate * scale, decay)
