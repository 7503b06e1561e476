"""Layer normalization without bias (arXiv:1607.06450)."""

from __future__ import annotations

import paddle
from paddle import nn

from paddlenlp_ext.ops.cpp.bf16 import activation_dtype
from paddlenlp_ext.ops.layer_norm import layer_norm


class LayerNorm(nn.Layer):
    """Layer normalization of the last axis, of length `size`, with a trained scale."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        ones, dtype = nn.initializer.Constant(1.0), activation_dtype(paddle.get_default_dtype())
        self.weight = self.create_parameter([size], dtype=dtype, default_initializer=ones)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map [..., size] to [..., size]. The computation is in float32."""
        return self.normalize(x, self.weight)

    def normalize(self, x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        """Map [..., size] to [..., size] with `weight` [size] in place of the layer's weight."""
        return layer_norm(x, weight, self.epsilon)
