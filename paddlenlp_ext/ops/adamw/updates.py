"""Arguments of the AdamW ops: the update of one parameter, with moments in fp32 or in 8 bits."""

from __future__ import annotations

from typing import NamedTuple

import paddle

from paddlenlp_ext.ops.stochastic_rounding import DrawPosition


class AdamWUpdate(NamedTuple):
    """Update of a parameter with float32 moments; parameter, moments and powers of beta are updated in place.

    Attributes:
        parameter, gradient, moment1, moment2: tensors of the same shape.
        beta1_power: [1], b1^t at the step t of this update.
        beta2_power: [1], b2^t at the step t of this update.
        rate: learning rate.
        decay: weight decay; the parameter shrinks by the factor `1 - rate * decay`.
    """

    parameter: paddle.Tensor
    gradient: paddle.Tensor
    moment1: paddle.Tensor
    moment2: paddle.Tensor
    beta1_power: paddle.Tensor
    beta2_power: paddle.Tensor
    rate: float
    decay: float


class Bf16Update(NamedTuple):
    """Update of a bfloat16 weight with float32 moments; either `master` or `position` is set.

    Attributes:
        update: update of the bfloat16 weight with a bfloat16 or float32 gradient.
        master: float32 copy of the weight.
        position: position of the weight in the random draws of stochastic rounding.
    """

    update: AdamWUpdate
    master: paddle.Tensor | None = None
    position: DrawPosition | None = None


BLOCK = 256


class Moments8Bit(NamedTuple):
    """First and second moment of one parameter, quantized to 8 bits.

    Attributes:
        codes1, codes2: codes of the first and the second moment, uint8 [blocks, BLOCK].
        scales1, scales2: scales of the first and the second moment, float32 [blocks, 1].
    """

    codes1: paddle.Tensor
    scales1: paddle.Tensor
    codes2: paddle.Tensor
    scales2: paddle.Tensor


class AdamStep(NamedTuple):
    """Hyperparameters of one step; `number` counts the steps from 1, and `rate` is the learning rate."""

    beta1: float
    beta2: float
    epsilon: float
    number: int
    rate: float

    @property
    def correction1(self) -> float:
        """Bias correction of the first moment, 1 / (1 - beta1^number)."""
        return 1.0 / (1.0 - self.beta1**self.number)

    @property
    def correction2(self) -> float:
        """Bias correction of the second moment, 1 / (1 - beta2^number)."""
        return 1.0 / (1.0 - self.beta2**self.number)

    def accumulate(self, moment1: paddle.Tensor, moment2: paddle.Tensor, gradient: paddle.Tensor) -> None:
        """Add a gradient to the running averages of both moments, in place."""
        moment1.scale_(self.beta1).add_(gradient * (1.0 - self.beta1))
        moment2.scale_(self.beta2).add_(gradient.square().scale_(1.0 - self.beta2))

    def quotient(self, moment1: paddle.Tensor, moment2: paddle.Tensor) -> paddle.Tensor:
        """Return the update direction: the first moment divided by the root of the second, both bias-corrected."""
        root = (moment2 * self.correction2).sqrt_().add_(paddle.full([], self.epsilon))
        return (moment1 * self.correction1).divide_(root)


class AdamW8BitUpdate(NamedTuple):
    """Update of one parameter with 8-bit moments; parameter, moments and `master` are updated in place.

    Attributes:
        parameter, gradient: tensors of the same shape; a parameter that is not fp32 has `master` or `position`.
        moments: quantized moments.
        step: hyperparameters; all updates of a call have the same betas and epsilon.
        decay: weight decay.
        master: fp32 copy of a parameter in half precision.
        position: position of a bfloat16 parameter in the random draws of stochastic rounding.
    """

    parameter: paddle.Tensor
    gradient: paddle.Tensor
    moments: Moments8Bit
    step: AdamStep
    decay: float = 0.0
    master: paddle.Tensor | None = None
    position: DrawPosition | None = None
