"""LoRA linear layer in plain Paddle, on any device."""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.frozen_linear import FrozenLinear


def lora_linear_reference(
    x: paddle.Tensor, base: FrozenLinear, a: paddle.Tensor, b: paddle.Tensor, scaling: float
) -> paddle.Tensor:
    """Compute `lora_linear` with separate matmuls."""
    inner = paddle.matmul(x, a, transpose_y=True) * scaling
    return base(x) + paddle.matmul(inner, b, transpose_y=True)
