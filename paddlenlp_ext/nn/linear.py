"""Linear layer with Hugging Face's weight layout [out_features, in_features]."""

from __future__ import annotations

import paddle
from paddle import nn

from paddlenlp_ext.ops.cpp.bf16 import activation_dtype
from paddlenlp_ext.ops.frozen_linear import FrozenDense, FrozenLinear
from paddlenlp_ext.ops.linear import linear
from paddlenlp_ext.ops.training_blocks import AdaptedLinear


class Linear(nn.Layer):
    """Linear layer `x @ weight^T + bias` with weight [out_features, in_features].

    If the weight has `stop_gradient` set, the backward pass computes only the gradient of the input.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = self.create_parameter([out_features, in_features], default_initializer=nn.initializer.Constant())
        bias_dtype = activation_dtype(self.weight.dtype)
        self.bias = self.create_parameter([out_features], dtype=bias_dtype, is_bias=True) if bias else None

    @property
    def compute_dtype(self) -> paddle.dtype:
        """Dtype of the activations and of adapters on this layer."""
        return activation_dtype(self.weight.dtype)

    @paddle.no_grad()
    def weight_value(self) -> paddle.Tensor:
        """Return the weight as float32 [out, in]. Do not modify the result in place: it may be the parameter itself."""
        return self.weight.astype("float32")

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map [..., in_features] to [..., out_features]. Under autocast on a GPU, the output has half precision."""
        return linear(x, self.weight, self.bias)

    def forward_without_bias(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map [..., in_features] to [..., out_features] without adding the bias."""
        return linear(x, self.weight)

    def as_frozen_linear(self) -> FrozenLinear | None:
        """Return the layer as an operand of a fused adapter op, or None if the layer's weight or bias is trained."""
        is_frozen = self.weight.stop_gradient and (self.bias is None or self.bias.stop_gradient)
        return FrozenDense(self.weight, self.bias) if is_frozen else None

    def as_adapted_linear(self) -> AdaptedLinear:
        """Return the layer as an operand of a training block."""
        return AdaptedLinear(self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
