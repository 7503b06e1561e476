"""Stochastic rounding of bfloat16 parameters, with a random number for each parameter element and step."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import paddle

from paddlenlp_ext.ops.stochastic_rounding import DrawPosition
from paddlenlp_ext.sharding_spec import shard_of


class StochasticRounding:
    """Random numbers for stochastic rounding of bfloat16 parameters (ops/stochastic_rounding.py).

    A random number is a function of seed, optimizer step, parameter name and position in the unsharded parameter. The
    number therefore does not depend on resumes or the parallel layout, and checkpoints need no generator state.

    Attributes:
        step: number of completed optimizer steps, set by `OptimizerStep`.
    """

    def __init__(self, seed: int, parameters: Mapping[str, paddle.Tensor]) -> None:
        """Store the seed, and the CRC-32 of the structured name of each parameter as its id."""
        self.step = 0
        self._seed = seed
        self._numbers = {parameter.name: zlib.crc32(name.encode()) for name, parameter in parameters.items()}

    def position(self, parameter: paddle.Tensor) -> DrawPosition:
        """Return the position of a parameter's local shard in the random numbers of the current step."""
        shape, shard = parameter.shape, shard_of(parameter)
        width = stride = math.prod(shape)
        first = 0
        if shard is not None:
            inner = math.prod(shape[shard.axis + 1 :])
            first, width, stride = shard.start * inner, shape[shard.axis] * inner, shard.size * inner
        return DrawPosition(self._seed, self._numbers[parameter.name], self.step, first, width, stride)
