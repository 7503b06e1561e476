"""AdamW with moments quantized to 8 bits (Dettmers et al. 2021, arXiv:2110.02861).

Moments are quantized in blocks of 256 elements with an fp32 scale, as in bitsandbytes since 0.44 (the paper uses blocks
of 2048). Together, the two moments take 2.03 bytes per weight instead of 8. A step dequantizes the moments, updates
parameter and moments in fp32, and quantizes the moments again. Parameters with fewer than 4096 elements have fp32
moments, as in bitsandbytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import paddle

from paddlenlp_ext.ops.adamw import BLOCK, AdamStep, AdamW8BitUpdate, Moments8Bit, adamw_8bit_op, dynamic_8bit
from paddlenlp_ext.trainer.optimizers.small_state_optimizer import ParameterUpdate, SmallStateOptimizer

SMALLEST = 4096
"""Minimum number of elements of a parameter whose moments are quantized."""

_MOMENTS = (("moment1", True), ("moment2", False))
"""Name of each moment, and whether it is signed."""


def moment_bytes(shape: Sequence[int]) -> int:
    """Return the size of the moments of a parameter in bytes."""
    size = math.prod(shape)
    return 8 * size if size < SMALLEST else -(-size // BLOCK) * 2 * (BLOCK + 4)


class AdamW8Bit(SmallStateOptimizer):
    """AdamW with decoupled weight decay and 8-bit moments; one call updates all quantized parameters."""

    @paddle.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        quantized = []
        for update in self._updates():
            if "moment1_scale" in update.state:
                quantized.append(self._quantized_update(update))
            else:
                self._update_one(update)
        if quantized:
            scales = quantized[0].moments.scales1  # fp32, on the device of the parameters
            adamw_8bit_op.choose(scales)(quantized)

    def _quantized_update(self, update: ParameterUpdate) -> AdamW8BitUpdate:
        parameter, gradient, state, step, weight_decay = update
        moments = Moments8Bit(state["moment1"], state["moment1_scale"], state["moment2"], state["moment2_scale"])
        position = None
        if self._rounding is not None and parameter.dtype != paddle.float32:
            position = self._rounding.position(parameter)
        return AdamW8BitUpdate(parameter, gradient, moments, step, weight_decay, state.get("master_weight"), position)

    def _new_moments(self, parameter: paddle.Tensor) -> dict[str, paddle.Tensor]:
        size = math.prod(parameter.shape)
        if size < SMALLEST:
            return {name: paddle.zeros(parameter.shape, "float32") for name in ("moment1", "moment2")}
        blocks = -(-size // BLOCK)
        moments = {}
        for name, signed in _MOMENTS:
            moments[name] = paddle.full([blocks, BLOCK], dynamic_8bit(signed).zero, "uint8")
            moments[f"{name}_scale"] = paddle.zeros([blocks, 1], "float32")
        return moments

    def _update_parameter(
        self, name: str, value: paddle.Tensor, gradient: paddle.Tensor, state: dict[str, paddle.Tensor], step: AdamStep
    ) -> None:
        moment1, moment2 = state["moment1"], state["moment2"]
        step.accumulate(moment1, moment2, gradient)
        value.subtract_(step.quotient(moment1, moment2).scale_(step.rate))
