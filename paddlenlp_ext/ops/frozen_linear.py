"""Frozen base layers of fused ops such as the LoRA linear (lora_linear/).

`FrozenDense`, `FrozenQuantized` and `FrozenInt8` have the same methods, so that a fused op supports unquantized
weights, quantized weights, and matmuls in 8-bit integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import paddle

from paddlenlp_ext.ops.cpp.bf16 import uses_bf16
from paddlenlp_ext.ops.int8_linear import int8_input_gradient_op, int8_linear
from paddlenlp_ext.ops.linear import linear, linear_input_gradient_op
from paddlenlp_ext.ops.quantized_linear import quantized_input_gradient_op, quantized_linear, takes_weight_only
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.ops.quantized_weight.triton import fits_tiles, tile_format, tile_layer
from paddlenlp_ext.ops.tensor_utils import contiguous

if TYPE_CHECKING:
    from paddlenlp_ext.ops.triton_utils.weight_tiles import Format, Layer


@dataclass(frozen=True)
class FrozenDense:
    """Frozen linear layer x W^T + bias with an unquantized matrix W [out, in] and a bias [out] or None."""

    weight: paddle.Tensor
    bias: paddle.Tensor | None

    @property
    def uses_bf16(self) -> bool:
        """Return whether the layer's C++ matmuls currently round their inputs to bfloat16."""
        return uses_bf16(self.weight)

    def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map [..., in] to [..., out], differentiably, on any device."""
        return linear(x, self.weight, self.bias)

    def input_gradient(self, gradient: paddle.Tensor) -> paddle.Tensor:
        """Return (dL/dy) W [..., in] for a gradient dL/dy [..., out], without autograd, on any device.

        On the CPU, the result is float32. Pass dL/dy in bfloat16 if the forward pass rounded x to bfloat16, and
        otherwise in float32.
        """
        return linear_input_gradient_op.choose(gradient)(gradient, self.weight)

    def has_paddle_product(self, x: paddle.Tensor) -> bool:
        """Return whether a single Paddle operator multiplies x by the stored weight without dequantizing the weight."""
        return True

    def fits_tiles(self, dtype: paddle.dtype) -> bool:
        """Return whether kernels can read the weight in tiles (triton_utils/weight_tiles.py) for x of this dtype."""
        return self.weight.dtype == dtype

    def tile_format(self) -> Format:
        """Return the weight format for kernels that read the weight in tiles."""
        from paddlenlp_ext.ops.triton_utils.weight_tiles import Format

        return Format()

    def tile_layer(self, y: paddle.Tensor) -> Layer:
        """Return the layer's tensors for a kernel that reads the weight in tiles and writes y [..., out]."""
        from paddlenlp_ext.ops.triton_utils.weight_tiles import Layer

        return Layer(contiguous(self.weight), y, self.bias)


@dataclass(frozen=True)
class FrozenQuantized:
    """Frozen linear layer with a quantized weight; the methods are documented in `FrozenDense`."""

    weight: QuantizedWeight
    bias: paddle.Tensor | None

    @property
    def uses_bf16(self) -> bool:
        return uses_bf16(self.weight)

    def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
        y = quantized_linear(x, self.weight)
        return y if self.bias is None else y + self.bias.astype(y.dtype)

    def input_gradient(self, gradient: paddle.Tensor) -> paddle.Tensor:
        return quantized_input_gradient_op.choose(gradient)(gradient, self.weight)

    def has_paddle_product(self, x: paddle.Tensor) -> bool:
        return takes_weight_only(x, self.weight)

    def fits_tiles(self, dtype: paddle.dtype) -> bool:
        return fits_tiles(self.weight)

    def tile_format(self) -> Format:
        return tile_format(self.weight)

    def tile_layer(self, y: paddle.Tensor) -> Layer:
        return tile_layer(self.weight, y, self.bias)


@dataclass(frozen=True)
class FrozenInt8(FrozenQuantized):
    """Frozen linear layer with a quantized weight, and matmuls in 8-bit integers (ops/int8_linear).

    Attributes:
        measure: function that is called with the input x of each forward pass, or None.
    """

    measure: Callable[[paddle.Tensor], None] | None = None

    def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.measure is not None:
            self.measure(x)
        if self.bias is None or self.bias.stop_gradient:
            return int8_linear(x, self.weight, self.bias)
        return int8_linear(x, self.weight) + self.bias

    def input_gradient(self, gradient: paddle.Tensor) -> paddle.Tensor:
        return int8_input_gradient_op.choose(gradient)(gradient, self.weight)

    def has_paddle_product(self, x: paddle.Tensor) -> bool:
        return False

    def fits_tiles(self, dtype: paddle.dtype) -> bool:
        return False


FrozenLinear: TypeAlias = FrozenDense | FrozenQuantized
