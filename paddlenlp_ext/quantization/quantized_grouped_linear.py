"""Grouped linear layer (the experts of an MoE layer) with a frozen quantized weight."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import paddle

from paddlenlp_ext.checkpoint.file_layouts.base import matrix_name
from paddlenlp_ext.nn.grouped_linear import GroupedLinear
from paddlenlp_ext.ops.dequantize import dequantize_stack
from paddlenlp_ext.ops.quantized_grouped_linear import quantized_grouped_linear
from paddlenlp_ext.ops.quantized_linear import quantized_linear
from paddlenlp_ext.ops.quantized_weight import QuantizedStack, QuantizedWeight, stack_weights
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_weight import quantize_layer
from paddlenlp_ext.quantization.quantized_linear import QuantizedLayer


class QuantizedGroupedLinear(QuantizedLayer):
    """`GroupedLinear` with a packed weight [G, O, I].

    The fused projections of each group are packed separately. Axis 0 of the buffers is the group.

    Args:
        weight: packed weight.
        compute_dtype: dtype of the activations and of adapters on this layer.
    """

    def __init__(self, weight: QuantizedStack, compute_dtype: paddle.dtype = paddle.float32) -> None:
        super().__init__(weight.matrices, weight.num_weights, compute_dtype)
        self.parts = weight.parts

    @property
    def stored(self) -> QuantizedStack:
        """Packed weight; shares the layer's tensors."""
        return QuantizedStack(self._packed())

    @property
    def weight_shape(self) -> tuple[int, int, int]:
        """Shape (G, O, I) of the weight."""
        return self.stored.shape

    @paddle.no_grad()
    def weight_value(self) -> paddle.Tensor:
        """Return the dequantized weight, float32 [G, O, I]; each call returns a new tensor."""
        return dequantize_stack(self.stored)

    def named_matrices(self, name: str) -> Iterator[tuple[str, QuantizedWeight]]:
        stack = self.stored
        for group, part in itertools.product(range(stack.shape[0]), range(stack.parts)):
            yield matrix_name(name, group, part), stack.matrix(group, part)

    def dequantized(self) -> GroupedLinear:
        groups, outputs, inputs = self.weight_shape
        layer = GroupedLinear(groups, inputs, outputs, self.parts)
        layer.to(dtype=self.compute_dtype)
        layer.weight.set_value(self.weight_value().astype(self.compute_dtype))
        return layer

    def forward(self, x_NI: paddle.Tensor, starts: np.ndarray) -> tuple[paddle.Tensor, ...]:
        """Return the output of each fused projection, [N, O / P]; see `ops.grouped_linear` for the arguments."""
        return quantized_grouped_linear(x_NI, self.stored, starts)

    def forward_group(self, x_NI: paddle.Tensor, group: int) -> tuple[paddle.Tensor, ...]:
        """Return the output of each fused projection for rows of a single group."""
        stack = self.stored
        return tuple(quantized_linear(x_NI, stack.matrix(group, part)) for part in range(stack.parts))

    def extra_repr(self) -> str:
        groups, outputs, inputs = self.weight_shape
        return f"groups={groups}, inputs={inputs}, outputs={outputs}, parts={self.parts}, {self.algo}"


AnyGroupedLinear = GroupedLinear | QuantizedGroupedLinear
"""Grouped linear layer, quantized or not."""


def quantize_stack(
    name: str, read: Callable[[int], paddle.Tensor], groups: int, parts: int, options: QuantizationConfig
) -> QuantizedStack:
    """Quantize a stacked weight [G, O, I], each matrix [O / P, I] of each group separately.

    Only one group at a time is in memory in full precision.

    Args:
        name: name of the layer, for error messages.
        read: function that returns the weight of a group, float32 [O, I], given the group's index.
        groups: number of groups G.
        parts: number P of projections fused in a group's weight.
        options: format, with a single algo.

    Raises:
        ValueError: a weight cannot be quantized (`quantize`).
    """
    return stack_weights(
        [[quantize_layer(name, part, options) for part in paddle.chunk(read(group), parts)] for group in range(groups)]
    )
