"""Root mean square normalisation as a layer."""

from __future__ import annotations

import paddle
from paddle import nn

from paddlenlp_ext.ops.cpu.bf16 import beside
from paddlenlp_ext.ops.rms_norm import add_rms_norm, rms_norm


class RMSNorm(nn.Layer):
    """Normalises the last axis, of `size`, and scales it by a learned weight that starts at one."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        ones, dtype = nn.initializer.Constant(1.0), beside(paddle.get_default_dtype())
        self.weight = self.create_parameter([size], dtype=dtype, default_initializer=ones)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map [..., size] to the same shape."""
        return rms_norm(x, self.weight, self.epsilon)

    def forward_add(self, x: paddle.Tensor, addend: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """`x + addend`, and that sum normalised; both [..., size]."""
        return add_rms_norm(x, addend, self.weight, self.epsilon)
