"""Frozen base layers of fused ops such as the LoRA linear.

A fused op computes the frozen base layer and the low-rank update in one differentiable step (see `lora_linear/`). It
needs the outputs and the input gradient of the base layer, whether its weight is dense or quantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import paddle

from paddlenlp_ext.ops.cpp.bf16 import uses_bf16
from paddlenlp_ext.ops.linear import linear, linear_input_gradient_op
from paddlenlp_ext.ops.quantized_linear import quantized_input_gradient_op, quantized_linear, takes_weight_only
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.ops.quantized_weight.triton import fits_tiles, tile_format, tile_layer
from paddlenlp_ext.ops.tensor_utils import contiguous

if TYPE_CHECKING:
    from paddlenlp_ext.ops.triton_utils.weight_tiles import Format, Layer


class FrozenLinear(Protocol):
    """Interface of a frozen linear layer, x W^T + bias, with W [out, in] and bias [out]."""

    @property
    def uses_bf16(self) -> bool:
        """Return whether the C++ matmuls of this layer currently round their inputs to bfloat16."""

    def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map [..., in] to [..., out], differentiably, on any device."""

    def input_gradient(self, gradient: paddle.Tensor) -> paddle.Tensor:
        """Return (dL/dy) W [..., in] for a gradient dL/dy [..., out], without autograd, on any device.

        The result is float32 on the CPU, where the gradient is bfloat16 if the layer rounded x to bfloat16.
        """

    def has_paddle_product(self, x: paddle.Tensor) -> bool:
        """Return whether one Paddle operator multiplies x by the stored weight without dequantizing it first."""

    def fits_tiles(self, dtype: paddle.dtype) -> bool:
        """Return whether kernels can read the weight in tiles (triton_utils/weight_tiles.py) for x of this dtype."""

    def tile_format(self) -> Format:
        """Return the format of the weight for a kernel that reads it in tiles."""

    def tile_layer(self, y: paddle.Tensor) -> Layer:
        """Return the tensors of the layer for a kernel that reads the weight in tiles and writes y [..., out]."""


@dataclass(frozen=True)
class FrozenDense:
    """Frozen linear layer with a float32 or bfloat16 matrix."""

    weight: paddle.Tensor
    bias: paddle.Tensor | None

    @property
    def uses_bf16(self) -> bool:
        """Return whether matmuls with this weight round their inputs to bfloat16."""
        return uses_bf16(self.weight)

    def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map [..., in] to [..., out] differentiably."""
        return linear(x, self.weight, self.bias)

    def input_gradient(self, gradient: paddle.Tensor) -> paddle.Tensor:
        """Return the input gradient [..., in]."""
        return linear_input_gradient_op.choose(gradient)(gradient, self.weight)

    def has_paddle_product(self, x: paddle.Tensor) -> bool:
        """Return True: Paddle multiplies by dense weights."""
        return True

    def fits_tiles(self, dtype: paddle.dtype) -> bool:
        """Return whether the weight has the dtype of x."""
        return self.weight.dtype == dtype

    def tile_format(self) -> Format:
        """Return the format of a dense weight."""
        from paddlenlp_ext.ops.triton_utils.weight_tiles import Format

        return Format()

    def tile_layer(self, y: paddle.Tensor) -> Layer:
        """Return the tensors of the layer for a kernel that writes y [..., out]."""
        from paddlenlp_ext.ops.triton_utils.weight_tiles import Layer

        return Layer(contiguous(self.weight), y, self.bias)


@dataclass(frozen=True)
class FrozenQuantized:
    """Frozen linear layer with a quantized weight."""

    weight: QuantizedWeight
    bias: paddle.Tensor | None

    @property
    def uses_bf16(self) -> bool:
        """Return whether matmuls with this weight round their inputs to bfloat16."""
        return uses_bf16(self.weight)

    def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map [..., in] to [..., out] differentiably."""
        y = quantized_linear(x, self.weight)
        return y if self.bias is None else y + self.bias.astype(y.dtype)

    def input_gradient(self, gradient: paddle.Tensor) -> paddle.Tensor:
        """Return the input gradient [..., in]."""
        return quantized_input_gradient_op.choose(gradient)(gradient, self.weight)

    def has_paddle_product(self, x: paddle.Tensor) -> bool:
        """Return whether Paddle has a fused kernel for the quantized weight."""
        return takes_weight_only(x, self.weight)

    def fits_tiles(self, dtype: paddle.dtype) -> bool:
        """Return whether each row consists of whole bytes and of blocks of equal size."""
        return fits_tiles(self.weight)

    def tile_format(self) -> Format:
        """Return the format of the quantized weight."""
        return tile_format(self.weight)

    def tile_layer(self, y: paddle.Tensor) -> Layer:
        """Return the tensors of the layer for a kernel that writes y [..., out]."""
        return tile_layer(self.weight, y, self.bias)
