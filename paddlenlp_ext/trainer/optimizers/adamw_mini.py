"""Adam-mini (Zhang et al. 2024, arXiv:2406.16793): one second moment per block of a parameter.

For a gradient g and each of its blocks b,

    m = beta1 m + (1 - beta1) g,   v_b = beta2 v_b + (1 - beta2) mean(g_b^2)

The update is the AdamW update, with v_b as the second moment of every element of b. The blocks follow the paper's
partition for Transformers:

| parameter | block |
|---|---|
| query or key projection | head |
| any other matrix | row: output neuron, or token in the embedding and lm_head |
| adapter matrix | row: rank in LoRA's A, output neuron in B |
| vector | full vector |
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import paddle

from paddlenlp_ext.config.sections.optim import OptimConfig
from paddlenlp_ext.ops.adamw.updates import AdamStep
from paddlenlp_ext.trainer.optimizers.bf16_rounding import StochasticRounding
from paddlenlp_ext.trainer.optimizers.small_state_optimizer import SmallStateOptimizer

_BY_HEADS = ("q_proj.weight", "q_b_proj.weight", "k_proj.weight")


def num_blocks(name: str, shape: Sequence[int], head_dim: int) -> int:
    """Return the number of second moments of a parameter.

    Args:
        name: structured name of the parameter.
        shape: shape of the parameter; the last axis has the input features.
        head_dim: number of rows of a head in a query or key projection.
    """
    if len(shape) < 2:
        return 1
    rows = math.prod(shape[:-1])
    return rows // head_dim if name.endswith(_BY_HEADS) else rows


def head_dim_of(name: str, config: Any) -> int:
    """Return the number of rows of a head in the layer that has the parameter `name`."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    return config.head_dim if layer is None else config.layer_shapes[int(layer[1])].head_dim


def moment_bytes(name: str, shape: Sequence[int], head_dim: int) -> int:
    """Return the size of the moments of a parameter in bytes; see `num_blocks` for the arguments."""
    return 4 * (math.prod(shape) + num_blocks(name, shape, head_dim))


class AdamWMini(SmallStateOptimizer):
    """Adam-mini with decoupled weight decay."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        options: OptimConfig,
        rounding: StochasticRounding | None,
        blocks: Mapping[str, int],
    ) -> None:
        """Initialize the base class; `blocks` maps Paddle's parameter names to the number of blocks."""
        super().__init__(groups, options, rounding)
        self._blocks = blocks

    def _new_moments(self, parameter: paddle.Tensor) -> dict[str, paddle.Tensor]:
        return {
            "moment1": paddle.zeros(parameter.shape, "float32"),
            "moment2": paddle.zeros([self._blocks[parameter.name], 1], "float32"),
        }

    def _update_parameter(
        self, name: str, value: paddle.Tensor, gradient: paddle.Tensor, state: dict[str, paddle.Tensor], step: AdamStep
    ) -> None:
        moment1, moment2 = state["moment1"], state["moment2"]
        by_block = gradient.reshape([self._blocks[name], -1])
        size = by_block.shape[1]
        # A matmul computes the sum, because a sum along an axis is less precise on the CPU.
        mean_square = paddle.matmul(by_block.square(), paddle.full([size, 1], 1.0 / size))
        moment1.scale_(self.beta1).add_(gradient * (1.0 - self.beta1))
        moment2.scale_(self.beta2).add_(mean_square * (1.0 - self.beta2))
        quotient = step.quotient(moment1.reshape(by_block.shape), moment2)
        value.subtract_(quotient.reshape(value.shape).scale_(step.rate))
