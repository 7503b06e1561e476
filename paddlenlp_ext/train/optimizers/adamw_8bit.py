"""AdamW whose moments are kept in 8 bits (Dettmers et al. 2021, arXiv:2110.02861).

The moments lie in blocks of 256, as in bitsandbytes since 0.44 (the paper has 2048), each with an fp32 scale: 2.03
bytes for a weight instead of 8. A step reads them, updates parameter and moments in fp32, and quantizes the moments
anew. A parameter of fewer than 4096 elements, a norm's or a small adapter's, keeps fp32 moments, as in bitsandbytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import paddle
import paddle.nn.functional as F

from paddlenlp_ext.ops.dynamic_8bit import dynamic_8bit
from paddlenlp_ext.train.optimizers.base import SmallStateOptimizer

BLOCK = 256
SMALLEST = 4096
"""Elements from which on a parameter's moments are in 8 bits."""
_SLICE = 1024
"""Blocks that are fp32 at one time: a megabyte, which stays in a core's cache."""

_MOMENTS = (("moment1", True), ("moment2", False))
"""Name, and whether it can be negative."""


def moment_bytes(shape: Sequence[int]) -> int:
    """What the moments of a parameter of this shape occupy."""
    size = math.prod(shape)
    return 8 * size if size < SMALLEST else -(-size // BLOCK) * 2 * (BLOCK + 4)


class AdamW8Bit(SmallStateOptimizer):
    """AdamW with decoupled weight decay and 8-bit moments."""

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

    def _move(
        self, name: str, value: paddle.Tensor, gradient: paddle.Tensor, state: dict[str, paddle.Tensor], rate: float
    ) -> None:
        step, moment1, moment2 = state["step"].item(), state["moment1"], state["moment2"]
        if moment1.dtype == paddle.float32:
            self._accumulate(moment1, moment2, gradient)
            value.subtract_(self.adam_quotient(moment1, moment2, step).scale_(rate))
            return
        flat_value, flat_gradient = value.reshape([-1]), gradient.reshape([-1])  # views: no number is copied
        for first in range(0, moment1.shape[0], _SLICE):
            elements = slice(first * BLOCK, (first + _SLICE) * BLOCK)
            part = flat_value[elements]
            quotient = self._quotient_of_blocks(_in_blocks(flat_gradient[elements]), state, first, step)
            part.subtract_(quotient.reshape([-1])[: part.shape[0]].scale_(rate))

    def _quotient_of_blocks(
        self, gradient: paddle.Tensor, state: dict[str, paddle.Tensor], first: int, step: int
    ) -> paddle.Tensor:
        """Adam's direction [blocks, BLOCK] for blocks from `first` on; their moments are updated."""
        blocks = slice(first, first + _SLICE)
        stored = [
            (dynamic_8bit(signed), state[name][blocks], state[f"{name}_scale"][blocks]) for name, signed in _MOMENTS
        ]
        moments = [quantizer.dequantize(codes, scales) for quantizer, codes, scales in stored]
        self._accumulate(*moments, gradient)
        for moment, (quantizer, codes, scales) in zip(moments, stored, strict=True):
            for new, live in zip(quantizer.quantize(moment), (codes, scales), strict=True):
                paddle.assign(new, live)
        return self.adam_quotient(*moments, step)

    def _accumulate(self, moment1: paddle.Tensor, moment2: paddle.Tensor, gradient: paddle.Tensor) -> None:
        moment1.scale_(self.beta1).add_(gradient * (1.0 - self.beta1))
        moment2.scale_(self.beta2).add_(gradient.square().scale_(1.0 - self.beta2))


def _in_blocks(flat: paddle.Tensor) -> paddle.Tensor:
    """Rows of `BLOCK` numbers, the last one filled up with zeros."""
    missing = -flat.shape[0] % BLOCK
    return (F.pad(flat, [0, missing]) if missing else flat).reshape([-1, BLOCK])
