"""Dense layers that do not train, in the parts that a larger step is made of.

An adapter beside one makes a single differentiable step of both. It asks for the values and for the input's gradient,
and not how the weight is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import paddle

from paddlenlp_ext.ops import linear as linear_module
from paddlenlp_ext.ops.cpu.bf16 import bf16_matmuls_enabled, uses_bf16
from paddlenlp_ext.ops.linear import linear
from paddlenlp_ext.ops.quantized.cpu import quantized_input_gradient_cpp, quantized_linear_cpp
from paddlenlp_ext.ops.quantized.linear import quantized_linear
from paddlenlp_ext.ops.quantized.weight import QuantizedWeight


class FrozenLinear(Protocol):
    """x W^T + bias with a frozen W [out, in] and bias [out]."""

    @property
    def uses_bf16(self) -> bool:
        """Whether native products round their inputs to bfloat16 now."""

    def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map [..., in] to [..., out], differentiably, on any device."""

    def cpp_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """The values alone, in a tensor of their own; x float32 in one piece on the CPU."""

    def cpp_input_gradient(self, gradient: paddle.Tensor) -> paddle.Tensor:
        """(dL/dy) W, float32 [..., in], in a tensor of its own.

        `gradient` [..., out] lies in one piece and in the format of the products: bfloat16 where x was rounded to it.
        """


@dataclass(frozen=True)
class FrozenDense:
    """One whose weight is a matrix, in float32 or bfloat16."""

    weight: paddle.Tensor
    bias: paddle.Tensor | None

    @property
    def uses_bf16(self) -> bool:
        """As `FrozenLinear`."""
        return uses_bf16(self.weight)

    def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
        """As `FrozenLinear`."""
        return linear(x, self.weight, self.bias)

    def cpp_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """As `FrozenLinear`."""
        matmul_operand = linear_module.matmul_operand
        return linear_module.forward(
            x, matmul_operand(self.weight), None if self.bias is None else matmul_operand(self.bias)
        )

    def cpp_input_gradient(self, gradient: paddle.Tensor) -> paddle.Tensor:
        """As `FrozenLinear`."""
        return linear_module.input_gradient(gradient, linear_module.matmul_operand(self.weight))


@dataclass(frozen=True)
class FrozenQuantized:
    """One whose weight is stored in few bits."""

    weight: QuantizedWeight
    bias: paddle.Tensor | None

    @property
    def uses_bf16(self) -> bool:
        """As `FrozenLinear`."""
        return bf16_matmuls_enabled()

    def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
        """As `FrozenLinear`."""
        y = quantized_linear(x, self.weight)
        return y if self.bias is None else y + self.bias.astype(y.dtype)

    def cpp_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """As `FrozenLinear`."""
        y = quantized_linear_cpp(x, self.weight)
        return y if self.bias is None else y.add_(self.bias)

    def cpp_input_gradient(self, gradient: paddle.Tensor) -> paddle.Tensor:
        """As `FrozenLinear`."""
        return quantized_input_gradient_cpp(gradient, self.weight)
