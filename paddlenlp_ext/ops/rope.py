"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), halves paired as Hugging Face lays weights out.

Shapes: B batch, S sequence, N heads, H head dimension.
"""

from __future__ import annotations

import paddle


def apply_rope_reference(x_BSNH: paddle.Tensor, cos_BSH: paddle.Tensor, sin_BSH: paddle.Tensor) -> paddle.Tensor:
    """Turn each pair (x[i], x[i + H/2]) by its angle; computed in fp32."""
    x = x_BSNH.astype("float32")
    first, second = paddle.chunk(x, 2, axis=-1)
    turned = paddle.concat([-second, first], axis=-1)
    return (x * cos_BSH.unsqueeze(2) + turned * sin_BSH.unsqueeze(2)).astype(x_BSNH.dtype)


def apply_rope(x_BSNH: paddle.Tensor, cos_BSH: paddle.Tensor, sin_BSH: paddle.Tensor) -> paddle.Tensor:
    """Rotate every head of `x_BSNH` by tables that `nn.rope.RotaryEmbedding` made from the positions."""
    return apply_rope_reference(x_BSNH, cos_BSH, sin_BSH)
