"""Gradients that overflow as in float16, for runs on the CPU, which has no float16 products."""

from __future__ import annotations

import paddle

from paddlenlp_ext.trainer.objectives.sft_objective import CrossEntropy

LARGEST = 65504.0


class OverflowingGradients(CrossEntropy):
    """Cross entropy whose gradients of the hidden states are infinite beyond the range of float16.

    Nothing is rounded, so runs that split a batch differently agree as in float32.

    Attributes:
        largest: largest value of the last gradient.
    """

    largest = 0.0

    def measure(self, model, hidden_BSD, batch):
        if paddle.is_grad_enabled():
            hidden_BSD = hidden_BSD * 1.0
            hidden_BSD.register_hook(self._overflow)
        return super().measure(model, hidden_BSD, batch)

    def _overflow(self, gradient: paddle.Tensor) -> paddle.Tensor:
        self.largest = float(gradient.abs().max())
        return paddle.where(gradient.abs() > LARGEST, gradient * float("inf"), gradient)
