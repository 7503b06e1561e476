"""Root mean square normalization layer (arXiv:1910.07467)."""

from __future__ import annotations

import paddle
from paddle import nn

from paddlenlp_ext.ops.cpu.bf16 import activation_dtype
from paddlenlp_ext.ops.rms_norm import add_rms_norm, rms_norm


class RMSNorm(nn.Layer):
    """Normalization of the last axis, of length `size`, followed by a trained scale that is initialized to one."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        ones, dtype = nn.initializer.Constant(1.0), activation_dtype(paddle.get_default_dtype())
        self.weight = self.create_parameter([size], dtype=dtype, default_initializer=ones)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map [..., size] to [..., size]."""
        return rms_norm(x, self.weight, self.epsilon)

    def forward_add(self, x: paddle.Tensor, addend: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return `x + addend` and the normalized sum, both [..., size]."""
        return add_rms_norm(x, addend, self.weight, self.epsilon)
