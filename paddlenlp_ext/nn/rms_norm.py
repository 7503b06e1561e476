"""Root mean square normalization layer (arXiv:1910.07467)."""

from __future__ import annotations

import paddle
from paddle import nn

from paddlenlp_ext.ops.cpp.bf16 import activation_dtype
from paddlenlp_ext.ops.rms_norm import add_rms_norm, rms_norm
from paddlenlp_ext.ops.rms_norm.reference import scale_of
from paddlenlp_ext.sharding_spec import ShardGroup


class RMSNorm(nn.Layer):
    """RMS normalization of the last axis, of length `size`, with a trained scale that is initialized to 1.

    The weight has the dtype `dtype`, or else the dtype of the activations.

    Attributes:
        offset: value added to the weight to obtain the scale: 0, or 1 in Gemma models.
        shards: ranks that hold the shards of the last axis; None if the axis is not sharded.
    """

    shards: ShardGroup | None = None

    def __init__(self, size: int, epsilon: float, offset: float = 0.0, dtype: str | None = None) -> None:
        super().__init__()
        self.epsilon, self.offset = epsilon, offset
        of_weight = dtype or activation_dtype(paddle.get_default_dtype())
        start = nn.initializer.Constant(1.0 - offset)
        self.weight = self.create_parameter([size], dtype=of_weight, default_initializer=start)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map [..., size] to [..., size]."""
        return self.normalize(x, self.weight)

    def forward_add(self, x: paddle.Tensor, addend: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return `x + addend` and the normalized sum, both [..., size]."""
        return self.normalize_sum(x, addend, self.weight)

    def normalize(self, x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        """Map [..., size] to [..., size] with `weight` [size] in place of the layer's weight."""
        if self.shards is not None:
            return self._norm_sharded(x, weight, self.shards)
        return rms_norm(x, weight, self.epsilon, self.offset)

    def normalize_sum(
        self, x: paddle.Tensor, addend: paddle.Tensor, weight: paddle.Tensor
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return `x + addend` and the sum normalized with `weight` [size], both [..., size]."""
        return add_rms_norm(x, addend, weight, self.epsilon, self.offset)

    def _norm_sharded(self, x: paddle.Tensor, weight: paddle.Tensor, shards: ShardGroup) -> paddle.Tensor:
        """Normalize in float32 by the mean square over all shards."""
        x_fp32 = x.astype("float32")
        squares = shards.copy(shards.all_reduce(x_fp32.square().sum(axis=-1, keepdim=True)))
        inverse = (squares / (x.shape[-1] * shards.size) + self.epsilon).rsqrt()
        return (x_fp32 * inverse * scale_of(weight, self.offset).astype("float32")).astype(x.dtype)
