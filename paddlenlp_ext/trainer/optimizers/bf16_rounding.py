"""Stochastic rounding of bfloat16 parameters, with random draws by parameter and position."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import paddle

from paddlenlp_ext.ops.stochastic_rounding import DrawPosition
from paddlenlp_ext.sharding_spec import shard_of


class StochasticRounding:
    """Random draws for the updates of bfloat16 parameters (ops/stochastic_rounding.py).

    A draw depends on the seed, the optimizer step, the parameter's name and the position in the full parameter. A
    resumed run and every parallel layout therefore draw the same numbers, and no generator state is saved.

    Attributes:
        step: number of optimizer steps before the current one; the training loop sets it.
    """

    def __init__(self, seed: int, parameters: Mapping[str, paddle.Tensor]) -> None:
        """Store the seed, and identify each parameter by the CRC-32 of its structured name."""
        self.step = 0
        self._seed = seed
        self._numbers = {parameter.name: zlib.crc32(name.encode()) for name, parameter in parameters.items()}

    def position(self, parameter: paddle.Tensor) -> DrawPosition:
        """Return the position of this process's shard of a parameter in the current step."""
        shape, shard = parameter.shape, shard_of(parameter)
        width = stride = math.prod(shape)
        first = 0
        if shard is not None:
            inner = math.prod(shape[shard.axis + 1 :])
            first, width, stride = shard.start * inner, shape[shard.axis] * inner, shard.size * inner
        return DrawPosition(self._seed, self._numbers[parameter.name], self.step, first, width, stride)
