"""Linear layer of experts: each expert multiplies a group of rows by its own weight matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.ops.cpp.bf16 import activation_dtype
from paddlenlp_ext.ops.grouped_linear import grouped_linear
from paddlenlp_ext.ops.linear import linear


class GroupedLinear(nn.Layer):
    """Grouped linear layer `x W[g]^T` over G groups of rows, with a weight [G, O, I]: O outputs and I inputs.

    Attributes:
        parts: number P of equal-sized projections that are stacked in the weight, such as 2 for gate and up.
    """

    def __init__(self, groups: int, inputs: int, outputs: int, parts: int = 1) -> None:
        super().__init__()
        zeros: Any = nn.initializer.Constant()
        self.parts = parts
        self.weight = self.create_parameter([groups, outputs, inputs], default_initializer=zeros)

    @property
    def weight_shape(self) -> tuple[int, int, int]:
        """Sizes (G, O, I): groups, outputs and inputs."""
        groups, outputs, inputs = self.weight.shape
        return groups, outputs, inputs

    @property
    def compute_dtype(self) -> paddle.dtype:
        """Dtype of the activations and of adapters on this layer."""
        return activation_dtype(self.weight.dtype)

    @paddle.no_grad()
    def weight_value(self) -> paddle.Tensor:
        """Return the weight as float32 [G, O, I]. Do not modify the result in place: it may be the parameter itself."""
        return self.weight.astype("float32")

    def forward(self, x_NI: paddle.Tensor, starts: np.ndarray) -> tuple[paddle.Tensor, ...]:
        """Return the output of each projection, [N, O / P]; see `ops.grouped_linear` for the arguments."""
        return grouped_linear(x_NI, self.weight, starts, self.parts)

    def forward_group(self, x_NI: paddle.Tensor, group: int) -> tuple[paddle.Tensor, ...]:
        """Apply the weight of one group to all rows; return the output of each projection, [N, O / P]."""
        size = self.weight.shape[1] // self.parts
        return tuple(linear(x_NI, self.weight[group, part * size : (part + 1) * size]) for part in range(self.parts))

    def extra_repr(self) -> str:
        groups, outputs, inputs = self.weight_shape
        return f"groups={groups}, inputs={inputs}, outputs={outputs}, parts={self.parts}"
