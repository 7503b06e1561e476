"""Layer normalization without bias (arXiv:1607.06450)."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle import nn

from paddlenlp_ext.ops.cpu.bf16 import activation_dtype


class LayerNorm(nn.Layer):
    """Normalization of the last axis, of length `size`, to mean 0 and variance 1, times a trained scale."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        ones, dtype = nn.initializer.Constant(1.0), activation_dtype(paddle.get_default_dtype())
        self.weight = self.create_parameter([size], dtype=dtype, default_initializer=ones)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map [..., size] to [..., size]; computed in float32."""
        weight = self.weight.astype("float32")
        return F.layer_norm(x.astype("float32"), weight.shape, weight, epsilon=self.epsilon).astype(x.dtype)
